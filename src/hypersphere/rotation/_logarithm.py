r"""From matrices of rotations back to generators, logarithms and free parameters.

All functions take orthogonal matrices (…, d, d) and compute in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import Cayley, Exponential, Neumann

__all__ = ["cayley_generator", "logarithm", "pack_generator", "parameters_of"]

# The generator of a rotation by 180° is infinite. From this size of its entries on, float32 parameters do not represent
# the rotation accurately.
_LARGEST_GENERATOR = 1e5


def cayley_generator(r: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    r"""Return the skew S with R = (I+S)(I−S)⁻¹, which is (R−I)(R+I)⁻¹.

    Raises:
        ValueError: R is not orthogonal, or it rotates a plane by 180° or reflects, so that S would be infinite.

    Example:
        >>> cayley_generator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([[ 0., -1.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    r = _numerics.to_float64(r)
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    is_orthogonal = factorizations.gram_error(r).abs() <= _numerics.rotation_tolerance(torch.float32)
    if not bool(is_orthogonal.all()):
        raise ValueError("a matrix of the rotation is not orthogonal")
    s, failed = torch.linalg.solve_ex(r + eye, r - eye, left=False)
    # Tested before S is made skew: the symmetric part that a reflection has would be lost.
    if bool(failed.any()) or not bool((s.abs() < _LARGEST_GENERATOR).all()):
        raise ValueError("a matrix of the rotation turns a plane by 180° or reflects, which has no finite generator")
    return (s - s.mT) / 2


def logarithm(r: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
    r"""Return the principal logarithm of R: the skew A with exp(A) = R whose angles are in (−180°, 180°).

    R = (I+S)(I−S)⁻¹ has the eigenvectors of S, and iμ of S becomes e^(2i·arctan μ). The Hermitian matrix iS has
    orthonormal eigenvectors even if eigenvalues repeat.

    Example:
        >>> logarithm(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([[ 0.0000, -1.5708],
                [ 1.5708,  0.0000]], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(1j * cayley_generator(r))
    angles = -2 * torch.atan(values)
    a = ((vectors * (1j * angles).unsqueeze(-2)) @ vectors.mH).real
    return (a - a.mT) / 2


def pack_generator(s: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch m"]:
    """Return the free parameters of a skew matrix: the inverse of `unpack_skew`."""
    return factorizations.pack_skew(s) / 2  # the transpose of unpacking counts both occurrences of each entry


def parameters_of(method: RowMap, r: Float[Tensor, "*batch d d"]) -> Float[Tensor, "..."]:
    """Return free parameters for which the map gives the orthogonal matrices R.

    Raises:
        ValueError: the map does not reach R.

    Example:
        >>> parameters_of(Cayley(), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([1.], dtype=torch.float64)
    """
    r = _numerics.to_float64(r)
    if isinstance(method, (Cayley, Neumann)):
        free = pack_generator(cayley_generator(r))
    elif isinstance(method, Exponential):
        free = pack_generator(logarithm(r))
    else:  # a map of a matrix P to the nearest orthogonal matrix or to Q of P = QT, for which R is a fixed point
        free = r
    reached = (method(free) - r).abs() <= _numerics.rotation_tolerance(torch.float32)
    if not bool(reached.all()):
        raise ValueError(f"{method!r} does not reach a matrix of the rotation")
    return free
