"""Reference implementations in NumPy, computed pair by pair, and published tables."""

import math

import numpy as np

import oracle

# Minimum Coulomb energies of n points on the sphere (Wales and Ulker; https://en.wikipedia.org/wiki/Thomson_problem).
THOMSON = {
    2: 0.500000000, 3: 1.732050808, 4: 3.674234614, 5: 6.474691495, 6: 9.985281374, 7: 14.452977414,
    8: 19.675287861, 9: 25.759986531, 10: 32.716949460, 11: 40.596450510, 12: 49.165253058, 13: 58.853230612,
    14: 69.306363297, 15: 80.670244114, 16: 92.911655302, 17: 106.050404829, 18: 120.084467447, 19: 135.089467557,
    20: 150.881568334, 21: 167.641622399, 22: 185.287536149, 23: 203.930190663, 24: 223.347074052, 25: 243.812760299,
    26: 265.133326317, 27: 287.302615033, 28: 310.491542358, 29: 334.634439920, 30: 359.603945904, 31: 385.530838063,
    32: 412.261274651,
}  # fmt: skip

# Largest possible minimum angles between n points on the sphere, in degrees (Sloane's tables of packings).
TAMMES = {4: 109.4712206, 5: 90.0, 6: 90.0, 7: 77.8695421, 8: 74.8584922, 9: 70.5287794, 11: 63.4349488, 12: 63.4349488}


def unit(w):
    return w / np.linalg.norm(w, axis=-1, keepdims=True)


def data_dependent(w, labels, s, distance="euclidean"):
    w, total = unit(np.asarray(w)), 0.0
    for y in labels:
        for j in range(len(w)):
            if j != y:
                apart = oracle.angle(w[y], w[j]) if distance == "angular" else np.linalg.norm(w[y] - w[j])
                total += oracle.kernel(apart, s)
    return total / (len(labels) * (len(w) - 1))


def neurons_of_transposed(weight, groups):
    """The filters of a transposed convolution, (groups, out, in·taps), entry by entry."""
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    return [
        [np.concatenate([weight[g * inputs + i, o].ravel() for i in range(inputs)]) for o in range(outputs)]
        for g in range(groups)
    ]


def log_energy(points):
    return sum(-math.log(np.linalg.norm(a - b)) for i, a in enumerate(points) for b in points[:i])


def icosahedron():
    golden = (1 + 5**0.5) / 2
    return unit(np.array([np.roll((0, a, b * golden), k) for a in (1, -1) for b in (1, -1) for k in range(3)], float))
