"""The search of DeepFool: a step to the nearest boundary of the linearised model, until the class changes."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.robustness.gradient import Model, tracked

__all__ = ["fooled"]


def fooled(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    linf: bool,
    steps: int,
    overshoot: float,
    candidates: int,
    nudge: float,
) -> Tensor:
    """Return images in [0, 1] that the model misclassifies where that was found; see `DeepFool` for the arguments.

    >>> fooled(
    ...     lambda x: x, torch.tensor([[0.6, 0.4]]), torch.tensor([0]),
    ...     linf=True, steps=5, overshoot=0.1, candidates=10, nudge=0.0,
    ... )
    tensor([[0.4900, 0.5100]])
    """
    result, total = images.clone(), torch.zeros_like(images)
    active = torch.arange(len(images), device=images.device)
    order: Tensor | None = None
    for _ in range(steps if len(images) else 0):
        with torch.inference_mode(False), torch.enable_grad():
            x = tracked(result[active])
            logits = model(x)
            if order is None:
                wide = logits.ndim == 2 and logits.shape[1] >= 2
                require(wide, "model", "images to logits (B, C) of two classes or more", tuple(logits.shape))
                order = logits.detach().topk(min(candidates, logits.shape[1])).indices
            right = logits.argmax(1) == labels[active]
            if not right.any():
                break
            values = logits.gather(1, order[active])
            gaps = values[:, 1:] - values[:, :1]  # the first is the true class, wherever an image is still right
            slopes = [torch.autograd.grad(gap.sum(), x, retain_graph=True)[0] for gap in gaps.unbind(1)]
        active = active[right]
        step = _step(gaps.detach()[right], torch.stack(slopes, 1)[right].flatten(2), linf, nudge)
        total[active] += step.view_as(total[active])
        result[active] = (images[active] + (1 + overshoot) * total[active]).clamp(0, 1)
    return result


def _step(gaps: Tensor, slopes: Tensor, linf: bool, nudge: float) -> Tensor:
    """From gaps (B, K) and slopes (B, K, d), the shortest step (B, d) to where one of the gaps closes."""
    if linf:
        steepness, direction = slopes.abs().sum(2), slopes.sign()
    else:
        length, direction = sphere.polar(slopes)
        steepness = length.squeeze(2)
    flat = steepness == 0  # a boundary that no step comes nearer to
    distance = (gaps.abs() / steepness.masked_fill(flat, 1.0)).masked_fill(flat, torch.inf)
    nearest, best = distance.min(1)
    size = (nearest + nudge).masked_fill(nearest.isinf(), 0.0)
    return size.unsqueeze(1) * direction[torch.arange(len(best), device=best.device), best]
