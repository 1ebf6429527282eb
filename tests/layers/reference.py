"""The operator by its definition: cut out every patch, measure it, measure the filter, multiply; plain autograd.

The formulas of h and g are in torch, unlike in `tests/oracle.py`, because gradients are compared too.
"""

import math

import torch
import torch.nn.functional as F

ANGULARS = {
    "cosine": lambda c: c,
    "linear": lambda c: 1 - 2 * torch.acos(c) / math.pi,
    "sigmoid": lambda c, k=0.5: (
        (1 + math.exp(-math.pi / (2 * k)))
        / (1 - math.exp(-math.pi / (2 * k)))
        * (1 - torch.exp(torch.acos(c) / k - math.pi / (2 * k)))
        / (1 + torch.exp(torch.acos(c) / k - math.pi / (2 * k)))
    ),
    "square_cosine": lambda c: torch.sign(c) * c**2,
    "power_cosine": lambda c: 2 * ((1 + c) / 2) ** 3 - 1,
}
MAGNITUDES = {
    "sphere": lambda w, x: 0 * x + 1,
    "ball": lambda w, x: torch.minimum(x, torch.ones_like(x)),
    "tanh": lambda w, x: torch.tanh(x),
    "linear": lambda w, x: x,
    "seg": lambda w, x: torch.where(x <= 1, x, 0.5 * x + 0.5),
    "log": lambda w, x: torch.log(1 + x),
    "mix": lambda w, x: x + torch.log(1 + x),
    "inner_product": lambda w, x: w * x,
}
WEIGHTINGS = {
    None: lambda h, w, x: h(w, x),
    "linear": lambda h, w, x: w * h(w, x),
    "joint": lambda h, w, x: torch.tanh(w * x),
    "separate": lambda h, w, x: torch.tanh(w) * torch.tanh(x),
}


def patches(x, layer):
    """(N, places…, C, window…) of a batch, by indexing one place after the other."""
    pads = list(layer._reversed_padding_repeated_twice)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, pads, mode=mode) if any(pads) else x
    spatial = len(layer.kernel_size)
    spans = [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    counts = [(n - s) // t + 1 for n, s, t in zip(x.shape[2:], spans, layer.stride, strict=True)]
    cut = []
    for place in torch.cartesian_prod(*[torch.arange(n) for n in counts]).reshape(-1, spatial).tolist():
        index = [
            slice(p * t, p * t + s, d) for p, t, s, d in zip(place, layer.stride, spans, layer.dilation, strict=True)
        ]
        cut.append(x[(slice(None), slice(None), *index)])
    return torch.stack(cut, 1), counts


def convolve(x, layer, magnitude, angular, weighting=None):
    cut, counts = patches(x, layer)  # N, places, C, window
    out = []
    channels, filters = x.shape[1] // layer.groups, layer.out_channels // layer.groups
    for g in range(layer.groups):
        p = cut[:, :, g * channels : (g + 1) * channels].flatten(2)
        w = layer.weight[g * filters : (g + 1) * filters].flatten(1)
        out.append(respond(p, w, magnitude, angular, weighting))
    y = torch.cat(out, 2).transpose(1, 2).reshape(len(x), -1, *counts)
    return y if layer.bias is None else y + layer.bias.view(-1, *[1] * len(counts))


def respond(rows, w, magnitude, angular, weighting=None):
    """Responses of filters (K, d) to rows (…, d)."""
    x_norm, w_norm = rows.square().sum(-1, keepdim=True).sqrt(), w.square().sum(1).sqrt()
    c = rows @ w.T / (x_norm * w_norm)
    return WEIGHTINGS[weighting](MAGNITUDES[magnitude], w_norm, x_norm) * ANGULARS[angular](c)
