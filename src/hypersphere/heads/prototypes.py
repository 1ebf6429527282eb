r"""Fixed classifiers: class vectors that are spread over the sphere before training and never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.energy import minimize
from hypersphere.energy.minimum import simplex
from hypersphere.functions.margin import Margin
from hypersphere.heads.head import AngularHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hypersphere.heads.presets import HeadOptions

__all__ = ["FixedHead", "fixed"]


class FixedHead(AngularHead):
    r"""A head whose class vectors are the rows of a fixed matrix: only the network learns.

    The class vectors are the buffer `weight`, so optimisers do not see them and checkpoints contain them. In a
    `ShardedHead` they are a parameter without gradient.

    Args:
        vectors: (C, d) class vectors. They are normalised to unit vectors.
        radius: s, the norm to which features are rescaled, as in `AngularHead`. Class vectors always have norm 1.
        margin: as in `AngularHead`.
        options: the keywords of presets (`HeadOptions`).

    Example:
        >>> head = FixedHead(torch.eye(3, 8))
        >>> head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape, list(head.parameters())
        (torch.Size([]), [])
    """

    def __init__(
        self,
        vectors: Float[Tensor, "classes dim"],
        *,
        radius: str | float = 30.0,
        margin: str | Margin | Callable[[Tensor], Tensor] | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        is_matrix = isinstance(vectors, Tensor) and vectors.ndim == 2 and vectors.is_floating_point()
        require(is_matrix, "vectors", "a (C, d) matrix of class vectors", getattr(vectors, "shape", vectors))
        num_classes, in_features = vectors.shape
        require(options.get("centers", 1) == 1, "centers", "1 with fixed class vectors", options.get("centers"))
        super().__init__(in_features, num_classes, radius=radius, margin=margin, **options)
        _numerics.require_finite_rows("vectors", vectors)
        unit = sphere.normalize(_numerics.to_float64(vectors.detach())).to(torch.get_default_dtype())
        if _numerics.values_readable(unit):
            zero = (~unit.any(1)).nonzero().flatten().tolist()
            require(not zero, "vectors", "class vectors other than zero", f"zero in row {zero[:1]}")
        del self.weight
        self.register_buffer("weight", unit)
        self.decay_free_parameters = ()

    def _reset_weight(self) -> None:
        """Leave the class vectors as they are."""


def fixed(
    in_features: int,
    num_classes: int,
    s: float = 30.0,
    *,
    vectors: str | Tensor = "simplex",
    margin: str | Margin | None = None,
    **options: Unpack[HeadOptions],
) -> FixedHead:
    r"""A fixed classifier (hyperspherical prototypes): class vectors are a buffer and only the network learns.

    The loss is the softmax of s·cos θ_j, with a margin if one is given. With many classes it saves the gradient and the
    optimiser state of the class vectors, and no class can crowd out a rare one (Hoffer et al. 2018; Mettes et al. 2019;
    Pernici et al. 2021).

    Args:
        in_features: d, the length of a feature.
        num_classes: C.
        s: the radius.
        vectors: "simplex" for cosines of −1/(C−1) between all classes, which needs d ≥ C − 1; "energy" for a
            configuration of minimum energy (`hypersphere.energy.minimize`), for any d ≥ 2; or a (C, d) tensor.
        margin: a margin from `hypersphere.margin`, or None.
        options: as in other presets; `centers` must be 1.

    Example:
        >>> head = fixed(4, 5)
        >>> hs_cosines = sphere.cosines(head.weight, head.weight)
        >>> round(float(hs_cosines[0, 1]), 4), head(torch.randn(3, 4), torch.tensor([0, 1, 4])).shape
        (-0.25, torch.Size([]))
    """
    require(is_integer(in_features, 1), "in_features", "an integer >= 1", in_features)
    require(is_integer(num_classes, 2), "num_classes", "an integer >= 2", num_classes)
    if isinstance(vectors, Tensor):
        shape = (num_classes, in_features)
        require(tuple(vectors.shape) == shape, "vectors", f"of shape {shape}", tuple(vectors.shape))
        return FixedHead(vectors, radius=s, margin=margin, **options)
    accepted = "'simplex', 'energy' or a tensor of class vectors"
    require(isinstance(vectors, str) and vectors in ("simplex", "energy"), "vectors", accepted, vectors)
    if vectors == "simplex":
        needed = f"at least num_classes - 1 = {num_classes - 1} for the simplex (use vectors='energy' instead)"
        require(in_features >= num_classes - 1, "in_features", needed, in_features)
        points = simplex(num_classes, in_features)
    else:
        require(in_features >= 2 or num_classes == 2, "in_features", "at least 2 for vectors='energy'", in_features)
        points = minimize(num_classes, in_features, restarts=_restarts(num_classes, in_features)).points
    return FixedHead(points, radius=s, margin=margin, **options)


def _restarts(n: int, d: int) -> int:
    """Return the number of starts of the minimisation: fewer for many points, where local minima are nearly equal."""
    return max(1, min(8, 2**22 // (n * n + n * d)))
