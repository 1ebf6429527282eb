"""Reference implementations in float64 NumPy, written from the definitions."""

import numpy as np
import scipy.linalg


def gram_schmidt(p):
    """Classical Gram–Schmidt, one column at a time (thesis, F.1)."""
    basis = []
    for u in p.T:
        e = u - sum((b @ u) * b for b in basis)
        basis.append(e / np.linalg.norm(e))
    return np.stack(basis, 1)


def householder(p):
    """Algorithm 3 of the thesis. The sign of the last column is chosen so that the diagonal of T is positive."""
    d = len(p)
    r, q = p.copy(), np.eye(d)
    for j in range(d - 1):
        x = r[j:, j]
        v = x.copy()
        v[0] -= np.linalg.norm(x)
        if np.linalg.norm(v) > 0:
            h = np.eye(d)
            h[j:, j:] -= 2 * np.outer(v, v) / (v @ v)
            r, q = h @ r, q @ h
    q[:, -1] *= np.sign(r[-1, -1])
    return q


def lowdin(p):
    return p @ np.real(scipy.linalg.inv(scipy.linalg.sqrtm(p.T @ p)))


def cayley(s):
    eye = np.eye(len(s))
    return (eye + s) @ np.linalg.inv(eye - s)


MAPS = {
    "gram_schmidt": gram_schmidt,
    "modified": gram_schmidt,
    "iterative": gram_schmidt,
    "householder": householder,
    "lowdin": lowdin,
    "cayley": cayley,
    "bounded": cayley,
    "neumann": cayley,
    "exponential": scipy.linalg.expm,
    "free": lambda p: p,
    "positive_definite": lambda p: np.tril(p) @ np.tril(p).T,
    "triangular": np.tril,
    "upper": np.triu,
    "banded": lambda p: np.tril(np.triu(p, -1), 1),
}


def generator(free, bound=None):
    """Return the skew S of d(d−1)/2 entries, scaled down to ‖S‖_F = bound.

    The entries fill a rectangle of d//2 columns, of which the part below its diagonal is the left half of the lower
    triangle of S, and the rest is the right half, transposed.
    """
    d = round((1 + np.sqrt(1 + 8 * len(free))) / 2)
    half, odd = d // 2, d % 2
    s = np.zeros((d, d))
    for k, entry in enumerate(free):
        row, column = divmod(k, half)
        i, j = row + 1 - odd, column
        if j >= i:
            i, j = half + odd + column, half + row
        s[i, j], s[j, i] = entry, -entry
    norm = np.linalg.norm(s)
    return s if bound is None or norm <= bound else s * (bound / norm)


def rotation(name, free, bound=None):
    """Return R of the map `name` for float64 parameters. A vector holds the entries of a skew generator."""
    assert name in MAPS, f"add the formula of the map {name!r} to tests/rotation/reference.py"
    free = free.numpy()
    return MAPS[name](generator(free, bound) if free.ndim == 1 else free)
