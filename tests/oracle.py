"""Reference formulas in float64 NumPy, written from the definitions and independent of the library."""

import math

import numpy as np


def angle(a, b):
    """Return the angle by Kahan's formula, which is accurate for small and large angles."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return 2 * math.atan2(np.linalg.norm(a - b), np.linalg.norm(a + b))


def sigmoid(theta, k):
    """Return the sigmoid activation as printed in the thesis, equation 3.4."""
    scale = (1 + math.exp(-math.pi / (2 * k))) / (1 - math.exp(-math.pi / (2 * k)))
    rise = math.exp(theta / k - math.pi / (2 * k))
    return scale * (1 - rise) / (1 + rise)


def square_cosine(theta):
    """Return sign(cos θ)·cos² θ."""
    return math.copysign(math.cos(theta) ** 2, math.cos(theta))


ANGULARS = {
    "cosine": math.cos,
    "linear": lambda theta: 1 - 2 * theta / math.pi,
    "sigmoid": lambda theta, k=0.5: sigmoid(theta, k),
    "square_cosine": square_cosine,
    "power_cosine": lambda theta, t=3.0: 2 * math.cos(theta / 2) ** (2 * t) - 1,
}


def ball(x, alpha, radius):
    """Return the bounded magnitude: α·‖x‖/ρ up to ρ, then α."""
    return alpha * x / radius if x <= radius else alpha


def seg(x, alpha, beta, radius):
    """Return the segmented magnitude: slope α up to ρ, then slope β."""
    return alpha * x if x <= radius else beta * x + alpha * radius - beta * radius


MAGNITUDES = {
    "sphere": lambda w, x, alpha=1.0: alpha,
    "ball": lambda w, x, alpha=1.0, radius=1.0: ball(x, alpha, radius),
    "tanh": lambda w, x, alpha=1.0, radius=1.0: alpha * math.tanh(x / radius),
    "linear": lambda w, x, alpha=1.0: alpha * x,
    "seg": lambda w, x, alpha=1.0, beta=0.5, radius=1.0: seg(x, alpha, beta, radius),
    "log": lambda w, x, alpha=1.0: alpha * math.log(1 + x),
    "mix": lambda w, x, alpha=1.0, beta=1.0: alpha * x + beta * math.log(1 + x),
    "inner_product": lambda w, x: w * x,
}

# The weightings of a Tanh.
WEIGHTINGS = {
    "linear": lambda w, x, alpha=1.0, radius=1.0: w * alpha * math.tanh(x / radius),
    "joint": lambda w, x, alpha=1.0, radius=1.0: alpha * math.tanh(w * x / radius),
    "separate": lambda w, x, alpha=1.0, radius=1.0: alpha * math.tanh(w / radius) * math.tanh(x / radius),
}


def margin(theta, g=math.cos, m1=1.0, m2=0.0, m3=0.0):
    """Return the combined margin of g, which falls by 2 with every half turn of m₁θ + m₂."""
    phi, drop = m1 * theta + m2, 0.0
    while phi > math.pi + 1e-15:
        phi, drop = phi - math.pi, drop + 2
    return g(phi) - drop - m3


MARGINS = {
    "multiplicative": lambda theta, g=math.cos, m=4: margin(theta, g, m1=m),
    "additive_cosine": lambda theta, g=math.cos, m=0.35: g(theta) - m,
    "additive_angle": lambda theta, g=math.cos, m=0.5: margin(theta, g, m2=m),
    "combined": margin,
    "truncated_multiplicative": lambda theta, g=math.cos, m=1.5: g(min(m * theta, math.pi)),
    "divided_others": lambda theta, g=math.cos, m=1.5: g(theta),
    "two_sided": lambda theta, g=math.cos, m=0.4: g(theta) - m,
    "norm_adaptive": lambda theta, g=math.cos, m=0.4, h=0.333, momentum=0.01: g(theta) - m,
    # Called without features, these margins are those of a feature of the lowest norm and without noise.
    "norm_linear": lambda theta, g=math.cos, m_low=0.45, m_high=0.8, norm_low=10.0, norm_high=110.0, penalty=35.0: (
        margin(theta, g, m2=m_low)
    ),
    "random_angle": lambda theta, g=math.cos, m=0.5, sigma=0.05: margin(theta, g, m2=m),
}

OTHERS = {
    "divided_others": lambda theta, g=math.cos, m=1.5: g(theta / m),
    "two_sided": lambda theta, g=math.cos, m=0.4: g(theta) + m,
}

KERNELS = {
    "riesz": lambda z, power=2: z**-power,
    "logarithmic": lambda z: math.log(1 / z),
    "gaussian": lambda z, t=2: math.exp(-t * z**2),
}


def kernel(distance, s):
    """Return z^−s, or log(1/z) for s = 0."""
    return math.log(1 / distance) if s == 0 else distance**-s


def energy(w, s, distance="euclidean", half_space=False, weights=None, reduction="mean"):
    """Return the hyperspherical energy by a loop over ordered pairs."""
    w = np.asarray(w, dtype=np.float64)
    w = w / np.linalg.norm(w, axis=1, keepdims=True)
    if weights is not None:
        w = w * np.asarray(weights, dtype=np.float64)[:, None]
    if half_space:
        w = np.concatenate([w, -w])
    total, pairs = 0.0, 0
    for i in range(len(w)):
        for j in range(len(w)):
            if i != j:
                z = angle(w[i], w[j]) if distance == "angular" else np.linalg.norm(w[i] - w[j])
                total, pairs = total + kernel(z, s), pairs + 1
    return total / pairs if reduction == "mean" else total


def head_logits(
    x, w, y, *, radius="feature", normalize_weight=True, g=math.cos, psi=None, annealing_weight=0.0, bias=None
):
    """Return the scores with the margin on the target, entry by entry; `annealing_weight` is λ."""
    f = np.empty((len(x), len(w)))
    for i in range(len(x)):
        for j in range(len(w)):
            h = np.linalg.norm(x[i]) if radius == "feature" else radius
            h = h if normalize_weight else h * np.linalg.norm(w[j])
            theta = angle(x[i], w[j])
            f[i, j] = h * g(theta)
            if j == y[i] and psi is not None:
                f[i, j] = (annealing_weight * f[i, j] + h * psi(theta)) / (1 + annealing_weight)
            f[i, j] += 0 if bias is None else bias[j]
    return f


def cross_entropy(f, y):
    """Return the mean cross-entropy of scores."""
    losses = []
    for row, label in zip(f, y, strict=True):
        top = row.max()
        losses.append(top + math.log(np.exp(row - top).sum()) - row[label])
    return float(np.mean(losses))


def class_cosines(x, w, centers=1):
    """Return the largest cosine of each sample with the centres of each class, entry by entry."""
    classes = len(w) // centers
    return np.array(
        [[max(math.cos(angle(a, w[centers * j + k])) for k in range(centers)) for j in range(classes)] for a in x]
    )


def shifted(theta, shift):
    """Return cos(θ − shift), continued below zero so that it keeps rising as θ falls."""
    return math.cos(theta - shift) if theta >= shift else 2 - math.cos(theta - shift)


def objective(x, w, y, *, radius, psi, centers=1, hard=0, hard_margin=0.0, limit=None, hardness=None, ignored=-100):
    """Return the mean cross entropy of a margin head with options for other classes.

    `psi` maps the target angle, the feature norm and the label to the target's response; `hardness` is the t of
    CurricularFace; classes with a cosine above `limit` are left out.
    """
    cosines, losses = class_cosines(x, w, centers), []
    for i, label in enumerate(y):
        if label == ignored:
            continue
        target = psi(math.acos(np.clip(cosines[i, label], -1, 1)), np.linalg.norm(x[i]), label)
        others = [j for j in range(cosines.shape[1]) if j != label and (limit is None or cosines[i, j] <= limit)]
        nearest = sorted(others, key=lambda j: -cosines[i, j])[:hard]
        total = math.exp(radius * target)
        for j in others:
            response = cosines[i, j]
            if hardness is not None and response > target:
                response = response * (hardness + response)
            if j in nearest:
                response = shifted(math.acos(np.clip(cosines[i, j], -1, 1)), hard_margin)
            total += math.exp(radius * response)
        losses.append(math.log(total) - radius * target)
    return float(np.mean(losses))
