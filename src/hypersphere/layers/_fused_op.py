r"""The decoupled operator with an explicit backward, as a custom operator of torch.

**Forward.** With p = ⟨ŵ, x⟩ the product of a unit filter and a patch, n = ‖x‖, r = 1/n and c = p·r the cosine,

    y = h·g(c; k),   h = s·φ(a·n),

where g is the angular activation, φ a magnitude of the menu, and a, s and k are numbers per layer, per group or per
filter. `OperatorSpec` holds these five; a is its norm factor and s its response factor.

**Backward.** Let G be the gradient of y. The cosine depends on p and n, the magnitude on n:

    ∂c = G·h·g′(c)                      gradient of the cosine
    ∂p = ∂c·r                           gradient of the product, at constant norm
    ∂n = −r·Σ ∂c·c + Σ G·g·s·a·φ′(a·n)  gradient of the norm; sums over the filters of the group
    ∂ŵ = convolution_backward(∂p)
    ∂x = convolution_backward(∂p) + x·spread(∂n·r)      because ∂n/∂x = x/n for every patch that contains x
    ∂a = Σ G·g·s·φ′(a·n)·n     ∂s = Σ G·g·φ(a·n)     ∂k = Σ G·h·∂g/∂k     sums over samples and places

where `spread` sums over all patches that contain an entry (`ConvGeometry.window_spread`). Everything follows from x, ŵ,
the products p and the norms of the patches, so only these are saved for backward. The products take as much memory as
y, in the same dtype. With half storage, float16 cotangents cot θ replace float32 products. Their relative precision is
5e-4 at right angles and also near the poles, where float16 cosines would lose all digits of sin θ.

**Blocks.** Allocating a large buffer costs more than the arithmetic done in it, so samples are processed in blocks:
the product of a block, and everything computed from it, stays in cache. Temporaries are overwritten where
possible, because a pass over memory costs more than the arithmetic of most element-wise operations.

**Ordinary operations.** `reference_forward` computes the same function for all situations in which no custom operator
can be used; `choose_implementation` lists them. Second derivatives of the custom operator use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions.angular import ANGULARS, Cosine, Sigmoid
from hypersphere.functions.angular import Linear as LinearAngle
from hypersphere.functions.magnitude import MAGNITUDES, Tanh
from hypersphere.layers._geometry import ConvGeometry, MeasuredPatches, batch_blocks, measure_patches, split_batches
from hypersphere.layers._operator import OperatorSpec

__all__ = ["fused_forward", "reference_forward"]

# Responses per block of a convolution, which reads all filters once per block and should therefore be large.
PRODUCT_BLOCK = 2**19
# Responses per block of the element-wise operations on its result: 1 MB per float32 tensor. Smaller blocks would fit
# into an L2 cache, but the overhead of more calls cancels the gain.
ELEMENT_BLOCK = 2**18


def reference_forward(
    patches: MeasuredPatches,
    w_hat: Tensor,
    geometry: ConvGeometry,
    magnitude: Callable[[Tensor], Tensor | None],
    angular: Callable[[Tensor], Tensor],
) -> Tensor:
    r"""Return h·g(c) in the dtype of the input, in ordinary, differentiable operations.

    Args:
        patches: the input and its norms, from `measure_patches`, with a graph.
        w_hat: directions of the filters, or directions times the response factor.
        geometry: of the convolution.
        magnitude: h, a function of the norms (N, groups, 1, *places). It may return None for 1.
        angular: g, a function of the cosines (N, groups, filters per group, *places).
    """
    product = geometry.product(patches.x, w_hat.to(patches.x.dtype))
    value = angular(geometry.split_filters(_numerics.widen(product)) * patches.reciprocal)
    h = magnitude(patches.norm)
    if h is not None:
        value = value * h  # in this order the result has the memory format of the product
    return _numerics.narrow(value, product.dtype).flatten(1, 2)


def fused_forward(
    patches: MeasuredPatches, w_hat: Tensor, geometry: ConvGeometry, spec: OperatorSpec, *, saves_cotangents: bool
) -> Tensor:
    r"""Return s·φ(a·‖x‖)·g(c) like `reference_forward`, with the custom operator.

    Args:
        patches: the input and its norms, from `measure_patches`, without a graph: the operator differentiates the norms
            itself.
        w_hat: directions of the filters, or directions times the response factor.
        geometry: of the convolution.
        spec: φ, g, a, s and k.
        saves_cotangents: True to save float16 cotangents for backward instead of products. The filters must then be
            unit vectors.
    """
    k = spec.k
    needs_products = [patches.x, spec.norm_factor, spec.response_factor, k]
    if type(spec.angular) is not Cosine:  # ∂ŵ of a cosine needs ∂p = G·h·r only
        needs_products.append(w_hat)
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in needs_products)
    # Custom ops accept only tensors, numbers and strings, so g and φ travel as a menu name and numbers.
    arguments = _Arguments(
        patches.x,
        w_hat.to(patches.x.dtype),
        spec.norm_factor,
        spec.response_factor,
        k,
        patches.norm,
        patches.reciprocal,
        patches.square_range_scale,
        geometry.to_list(),
        *_name_and_numbers(spec.magnitude, MAGNITUDES),
        *_name_and_numbers(spec.angular if k is None else Sigmoid(), ANGULARS),
        storage="none" if not saves else "cotangents" if saves_cotangents else "products",
    )
    return _decoupled(*arguments)[0]


def _name_and_numbers(entry: object, menu: dict[str, Any]) -> tuple[str, list[float]]:
    """Describe a menu entry by types that a custom operator accepts."""
    name = next(name for name, kind in menu.items() if type(entry) is kind)
    return name, [float(getattr(entry, field.name)) for field in fields(entry)]  # type: ignore[arg-type]


class _Arguments(NamedTuple):
    """The arguments of both custom operators. Their schemas are derived from these names and types."""

    # Tensors that can have a gradient.
    x: Tensor
    weight: Tensor
    norm_factor: Tensor | None
    response_factor: Tensor | None
    k: Tensor | None
    # Constant tensors, from `MeasuredPatches`.
    norm: Tensor
    reciprocal: Tensor
    square_range_scale: Tensor
    # Settings, in types that torch can pass to an operator.
    geometry: list[int]
    magnitude: str
    magnitude_numbers: list[float]
    angular: str
    angular_numbers: list[float]
    storage: str  # what is saved for backward: "products", "cotangents" or "none"

    @property
    def differentiated(self) -> tuple[Tensor | None, ...]:
        """The arguments that can have a gradient."""
        return self.x, self.weight, self.norm_factor, self.response_factor, self.k

    @property
    def convolution(self) -> ConvGeometry:
        return ConvGeometry.from_list(self.geometry)

    @property
    def spec(self) -> OperatorSpec:
        """The operator, rebuilt from names and numbers."""
        angular = ANGULARS[self.angular](*self.angular_numbers) if self.k is None else Sigmoid(self.k)
        magnitude = MAGNITUDES[self.magnitude](*self.magnitude_numbers)
        return OperatorSpec(magnitude, angular, self.norm_factor, self.response_factor)  # type: ignore[arg-type]

    @property
    def responses_per_sample(self) -> int:
        """Filters times places."""
        return self.reciprocal[:1].numel() * len(self.weight) // self.reciprocal.shape[1]

    def product_blocks(self) -> list[slice]:
        """Return blocks for the product, large compared with the filters, which each of them reads once."""
        return batch_blocks(max(PRODUCT_BLOCK, 4 * self.weight.numel()), self.responses_per_sample, self.x)


TENSOR_COUNT = _Arguments._fields.index("geometry")
SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", list[int]: "int[]", list[float]: "float[]", str: "str"}
# Tensor x, Tensor weight, Tensor? norm_factor, Tensor? response_factor, Tensor? k, Tensor norm, Tensor reciprocal,
# Tensor square_range_scale, int[] geometry, str magnitude, float[] magnitude_numbers, str angular,
# float[] angular_numbers, str storage
SCHEMA = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(_Arguments).items())


@torch.library.custom_op("hypersphere::decoupled", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def _decoupled(*values: Any) -> tuple[Tensor, Tensor]:
    """Return y (N, filters, *places) and the tensor saved for backward, in the same shape or empty."""
    arguments = _Arguments(*values)
    x, weight, norm, reciprocal = arguments.x, arguments.weight, arguments.norm, arguments.reciprocal
    convolution, spec = arguments.convolution, arguments.spec
    kernel = _angular_kernel(spec)
    saves_products, saves_cotangents = (arguments.storage == kind for kind in ("products", "cotangents"))
    y = stored = None
    for block in arguments.product_blocks():
        product = convolution.product(x[block], weight)
        # If the batch is one block, avoid a copy: the product becomes the saved tensor or, if products are not saved,
        # the output. The outputs of a custom operator must not be views.
        reusable = len(product) == len(x) and not product._is_view()
        if y is None:  # allocated here, because only the product tells the memory format
            y = product if reusable and not saves_products else _empty_like(product, len(x), product.dtype)
            if saves_products:
                stored = product if reusable else _empty_like(product, len(x), product.dtype)
            elif saves_cotangents:
                stored = _empty_like(product, len(x), torch.float16)
        for p, r, n, out, saved in split_batches(
            ELEMENT_BLOCK,
            arguments.responses_per_sample,
            convolution.split_filters(product),
            reciprocal[block],
            norm[block],
            convolution.split_filters(y[block]),
            None if stored is None or stored is product else convolution.split_filters(stored[block]),
        ):
            if saves_products and saved is not None:
                saved.copy_(p)
            # The cosine c = p·r, written into the output if its dtype is wide enough.
            c = torch.mul(p, r, out=out) if out.dtype == r.dtype else p.to(r.dtype).mul_(r)
            if saves_cotangents:
                saved.copy_(_numerics.cotangent(c))
            value = kernel.value_(c)  # g(c)
            terms = _magnitude_terms(spec, n)
            if terms is not None:
                value.mul_(terms.h)  # y = h·g(c)
            if value is not out:
                out.copy_(_numerics.narrow(value, out.dtype))
    assert y is not None
    return y, x.new_empty(0) if stored is None else stored


@_decoupled.register_fake
def _(*values: Any) -> tuple[Tensor, Tensor]:
    """Describe the shapes, dtypes and memory formats of the outputs to the compiler."""
    arguments = _Arguments(*values)
    y = arguments.convolution.product(arguments.x, arguments.weight)
    if arguments.storage == "none":
        return y, y.new_empty(0)
    return y, torch.empty_like(y, dtype=torch.float16 if arguments.storage == "cotangents" else y.dtype)


@torch.library.custom_op(
    "hypersphere::decoupled_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor stored, bool[] needed, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _decoupled_backward(grad: Tensor, stored: Tensor, needed: list[bool], *values: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, a, s and k. A gradient that is not needed is an empty tensor."""
    arguments = _Arguments(*values)
    x, weight, square_range_scale = arguments.x, arguments.weight, arguments.square_range_scale
    convolution, spec, wide = arguments.convolution, arguments.spec, arguments.reciprocal.dtype
    kernel, parameters = _angular_kernel(spec), _ParameterGradients(spec, needed, wide)
    grad_x = grad_weight = None  # allocated by the first block
    for block in arguments.product_blocks():
        r, n = arguments.reciprocal[block], arguments.norm[block]
        grad_product = torch.empty_like(grad[block], dtype=wide)
        grad_norm: list[Tensor] = []
        for grad_piece, saved, r_piece, n_piece, out in split_batches(
            ELEMENT_BLOCK,
            arguments.responses_per_sample,
            convolution.split_filters(grad[block]),
            convolution.split_filters(stored[block]) if stored.numel() else None,
            r,
            n,
            convolution.split_filters(grad_product),
        ):
            cosines = _SavedCosines(saved, r_piece, are_cotangents=arguments.storage == "cotangents")
            grad_norm += _element_gradients(kernel, _numerics.widen(grad_piece), cosines, n_piece, out, parameters)
        # ∂ŵ, and the part of ∂x that passes through the products.
        grad_x_block, grad_weight_block = convolution.product_gradients(
            grad_product.to(x.dtype), x[block], weight, (needed[0], needed[1])
        )
        if grad_weight_block is not None:  # summed in float32 or wider over all blocks
            grad_weight = grad_weight_block.to(wide) if grad_weight is None else grad_weight.add_(grad_weight_block)
        if grad_x_block is not None:
            # The part of ∂x that passes through the norms, x·spread(∂n·r). The square range scale divides one
            # factor and multiplies the other, because r² may overflow for tiny inputs.
            spread = convolution.window_spread(
                torch.cat(grad_norm).mul_(r / square_range_scale[block].unsqueeze(1)).squeeze(2), x.shape[2:]
            )
            if grad_x is None:  # a single block is updated in place
                grad_x = grad_x_block if len(grad_x_block) == len(x) else torch.empty_like(x)
            torch.addcmul(
                convolution.split_filters(grad_x_block),
                convolution.split_filters(x[block] * square_range_scale[block]),
                spread.unsqueeze(2),
                out=convolution.split_filters(grad_x[block]),
            )
    results = (grad_x, grad_weight, parameters.norm_factor, parameters.response_factor, kernel.k_gradient(parameters))
    return tuple(
        _match_layout(result, like) if need and result is not None and like is not None else x.new_empty(0)
        for result, like, need in zip(results, arguments.differentiated, needed, strict=True)
    )


@_decoupled_backward.register_fake
def _(grad: Tensor, stored: Tensor, needed: list[bool], *values: Any) -> tuple[Tensor, ...]:
    """Gradients have the layout of their inputs; `_match_layout` ensures this."""
    inputs = _Arguments(*values).differentiated
    return tuple(
        grad.new_empty(0) if like is None or not need else torch.empty_like(like)
        for like, need in zip(inputs, needed, strict=True)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the second output and the tensor arguments for backward. The settings are not tensors."""
    ctx.save_for_backward(output[1], *inputs[:TENSOR_COUNT])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # an unused output has the gradient None, not a tensor of zeros
    ctx.settings = inputs[TENSOR_COUNT:]


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """Return one gradient per argument of `_decoupled`, None for all but x, weight, a, s and k."""
    stored, *tensors = ctx.saved_tensors
    arguments = _Arguments(*tensors, *ctx.settings)
    needed = list(ctx.needs_input_grad[: len(arguments.differentiated)])
    grads: Iterable[Tensor | None]
    if grad is None:
        grads = [None] * len(needed)
    elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # With create_graph=True the gradients must be differentiable themselves. A compiler also traces with gradients
        # enabled, but differentiates only once.
        grads = _differentiable_gradients(arguments, grad, needed)
    else:
        grads = _decoupled_backward(grad, stored, needed, *arguments)
    no_gradients = [None] * (len(arguments) - len(needed))
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *no_gradients


_decoupled.register_autograd(_differentiate, setup_context=_save_for_backward)


def _differentiable_gradients(arguments: _Arguments, grad: Tensor, needed: list[bool]) -> list[Tensor | None]:
    """Return the gradients of x, weight, a, s and k with a graph, from ordinary operations on the saved inputs."""

    def reference(
        x: Tensor, weight: Tensor, norm_factor: Tensor | None, response_factor: Tensor | None, k: Tensor | None
    ) -> Tensor:
        learned = arguments._replace(norm_factor=norm_factor, response_factor=response_factor, k=k)
        convolution, spec = learned.convolution, learned.spec
        patches = measure_patches(x, convolution, with_graph=True)
        # Multiply by n·r, the ratio of the norms that the operator received to the norms of its input `x`
        # (`MeasuredPatches`).
        patches = patches._replace(norm=patches.norm * (arguments.norm * arguments.reciprocal))
        return reference_forward(patches, weight, convolution, spec.h, spec.angular)

    return differentiable_gradients(reference, arguments.differentiated, needed, grad)


# Element-wise derivatives --------------------------------------------------------------------------------------------


class _MagnitudeTerms(NamedTuple):
    """The argument a·n, φ(a·n) and h = s·φ(a·n)."""

    argument: Tensor
    phi: Tensor
    h: Tensor


def _magnitude_terms(spec: OperatorSpec, n: Tensor) -> _MagnitudeTerms | None:
    """Return the terms of h for norms n (N, groups, 1, *places), or None if h = 1."""
    if spec.has_unit_magnitude:
        return None
    argument = n if spec.norm_factor is None else n * spec.norm_factor
    if type(spec.magnitude) is Tanh:
        # tanh(u) = e/(−2 − e) with e = expm1(−2u), almost twice as fast as torch.tanh and as accurate.
        e = torch.mul(argument, -2 / spec.magnitude.radius).expm1_()
        phi = e.div_(torch.rsub(e, -2))
        phi = phi if spec.magnitude.alpha == 1 else phi.mul_(spec.magnitude.alpha)
    else:
        phi = spec.magnitude.at(argument)
    return _MagnitudeTerms(argument, phi, phi if spec.response_factor is None else phi * spec.response_factor)


class _ParameterGradients:
    """Accumulate the gradients of a and s, and the two sums from which `_SigmoidKernel.k_gradient` computes ∂k."""

    def __init__(self, spec: OperatorSpec, needed: list[bool], wide: torch.dtype) -> None:
        self.spec = spec
        needs_x, _, needs_a, needs_s, needs_k = needed
        self.needs_norm = needs_x or needs_a or needs_s  # ∂n, or a part of it
        self.needs_magnitude = self.needs_norm and not spec.has_unit_magnitude  # the derivative of h

        def zeros(t: Tensor | None, need: bool) -> Tensor | None:
            return torch.zeros_like(t, dtype=wide) if t is not None and need else None

        self.norm_factor, self.response_factor = zeros(spec.norm_factor, needs_a), zeros(spec.response_factor, needs_s)
        self.sigma_sum, self.value_sum = zeros(spec.k, needs_k), zeros(spec.k, needs_k)


class _SavedCosines(NamedTuple):
    """The cosines of a block in the form in which they were saved for backward.

    Attributes:
        saved: products p or cotangents (N, groups, filters per group, *places), or None if no gradient needs them.
        r: reciprocal norms (N, groups, 1, *places).
        are_cotangents: whether `saved` holds cotangents.
    """

    saved: Tensor | None
    r: Tensor
    are_cotangents: bool

    def cosines(self) -> Tensor:
        """Return c as a new tensor in float32 or wider."""
        assert self.saved is not None
        return _cosines_from_cotangents(self.saved) if self.are_cotangents else torch.mul(self.saved, self.r)

    def sum_with(self, grad: Tensor, spec: OperatorSpec) -> Tensor:
        """Return G·c after `OperatorSpec.sum_filters`, as a new tensor."""
        assert self.saved is not None
        if self.are_cotangents:
            return spec.sum_filters(self.cosines().mul_(grad))
        # In c = p·r, r is the same for all filters of a group, so it is applied after the sum.
        return spec.sum_filters(torch.mul(grad, self.saved)).mul_(self.r)


def _element_gradients(
    kernel: _AngularKernel,
    grad: Tensor,
    cosines: _SavedCosines,
    n: Tensor,
    out: Tensor,
    parameters: _ParameterGradients,
) -> list[Tensor]:
    """Write ∂p into `out`, add to the gradients of a, s and k, and return [∂n], or [] if only ŵ and k need gradients.

    Args:
        kernel: of g.
        grad: G (N, groups, filters per group, *places), in float32 or wider.
        cosines: in the same shape.
        n: norms (N, groups, 1, *places), the shape of ∂n.
        out: uninitialised, in the shape of `grad`.
        parameters: sums of the gradients of a, s and k.
    """
    r, terms = cosines.r, _magnitude_terms(parameters.spec, n)
    h = None if terms is None else terms.h
    # One number per patch unless h depends on the filter, so multiplying h and r first saves a pass.
    h_r = r if h is None else h * r
    sums = kernel.gradients(grad, cosines, h, h_r, out, parameters)
    if sums is None:
        return []
    # ∂n through the cosine c = p/n, whose derivative is −c·r.
    grad_norm = -(sums.radial * h_r).sum(2, keepdim=True)
    if terms is None:
        return [grad_norm]
    assert sums.values is not None
    return [grad_norm.add_(_magnitude_gradient(sums.values, terms, r, n, parameters))]


def _magnitude_gradient(
    values: Tensor, terms: _MagnitudeTerms, r: Tensor, n: Tensor, parameters: _ParameterGradients
) -> Tensor:
    """Return ∂n through the magnitude, and add to the gradients of a and s.

    Args:
        values: G·g, after `OperatorSpec.sum_filters`. It is overwritten.
        terms: of the magnitude.
        r: reciprocal norms (N, groups, 1, *places).
        n: norms in the same shape.
        parameters: sums of the gradients of a and s.
    """
    spec = parameters.spec
    if parameters.response_factor is not None:  # ∂s
        _add_sum_(parameters.response_factor, values * terms.phi)
    # G·g·s·φ′(a·n), the gradient of a·n.
    values = values.mul_(spec.magnitude.slope(terms.argument, terms.phi))
    if spec.response_factor is not None:
        values = values * spec.response_factor
    if parameters.norm_factor is not None:  # ∂a
        _add_sum_(parameters.norm_factor, values * n)
    if spec.norm_factor is not None:
        values = values * spec.norm_factor
    # ∂n is the gradient of the norm 1/r of the operator's input, so by the chain rule there is a factor n·r, a power
    # of two (`MeasuredPatches`).
    return values.sum(2, keepdim=True) * (n * r)


# Angular activations -------------------------------------------------------------------------------------------------


class _FilterSums(NamedTuple):
    """G·g′·c and G·g after `OperatorSpec.sum_filters`. G·g may be the same tensor, and may be None if h = 1."""

    radial: Tensor
    values: Tensor | None


class _AngularKernel:
    """g and its derivative for blocks of cosines. A subclass is a faster form for one g."""

    def __init__(self, angular: Any) -> None:
        self.angular = angular

    def value_(self, c: Tensor) -> Tensor:
        """Return g(c). `c` may be overwritten."""
        value: Tensor = self.angular(c)
        return value

    def gradients(
        self,
        grad: Tensor,
        cosines: _SavedCosines,
        h: Tensor | None,
        h_r: Tensor,
        out: Tensor,
        parameters: _ParameterGradients,
    ) -> _FilterSums | None:
        """Write ∂p = G·g′·h·r into `out`, add to the gradient of k, and return the sums for ∂n if it is needed."""
        c, spec = cosines.cosines(), parameters.spec
        grad_times_derivative, grad_times_value = self.products(grad, c, h, parameters)
        torch.mul(grad_times_derivative, h_r, out=out)
        if not parameters.needs_norm:
            return None
        radial = spec.sum_filters(grad_times_derivative.mul_(c))
        return _FilterSums(radial, None if grad_times_value is None else spec.sum_filters(grad_times_value))

    def products(
        self, grad: Tensor, c: Tensor, h: Tensor | None, parameters: _ParameterGradients
    ) -> tuple[Tensor, Tensor | None]:
        """Return G·g′(c), and G·g(c) if the magnitude needs it; add to the gradient of k. Both are new tensors."""
        value = self.angular(c)
        return self.angular.slope(c, value) * grad, value * grad if parameters.needs_magnitude else None

    def k_gradient(self, parameters: _ParameterGradients) -> Tensor | None:
        """Return ∂k from the sums over all blocks, or None if k is not learned."""
        return None


class _CosineKernel(_AngularKernel):
    """g = c and g′ = 1, so G·g′·c and G·g are both G·c. The filters need ∂p = G·h·r only, without the cosine."""

    def gradients(
        self,
        grad: Tensor,
        cosines: _SavedCosines,
        h: Tensor | None,
        h_r: Tensor,
        out: Tensor,
        parameters: _ParameterGradients,
    ) -> _FilterSums | None:
        torch.mul(grad, h_r, out=out)
        if not parameters.needs_norm:
            return None
        grad_times_c = cosines.sum_with(grad, parameters.spec)
        return _FilterSums(grad_times_c, grad_times_c)


class _LinearKernel(_AngularKernel):
    """g = (2/π)·e with the elevation e = π/2 − θ = arcsin c, and de/dc = 1/sin θ."""

    def value_(self, c: Tensor) -> Tensor:
        return _numerics.arcsin_(c).mul_(-self.angular.angle_slope())

    def products(
        self, grad: Tensor, c: Tensor, h: Tensor | None, parameters: _ParameterGradients
    ) -> tuple[Tensor, Tensor | None]:
        derivative = -self.angular.angle_slope()  # dg/de
        value = _numerics.arcsin(c).mul_(derivative).mul_(grad) if parameters.needs_magnitude else None
        return _numerics.cosecant(c).mul_(derivative).mul_(grad), value


class _SigmoidKernel(_AngularKernel):
    """g = tanh(e/2k)/T = (2σ(e/k) − 1)/T with T = tanh(π/4k). σ is faster than tanh.

    With σ′ = σ(1 − σ), the derivatives are

        dg/de = 2σ′/(kT),     ∂g/∂k = −(2/(k²T))·σ′·e + (π/4)(1 − T²)/(k²T)·g,

    so Σ G·h·σ′·e and Σ G·h·g are summed over blocks and combined once at the end.
    """

    def __init__(self, angular: Sigmoid) -> None:
        super().__init__(angular)
        k, height = angular.k, angular.height
        # Computed once for all blocks.
        self.inverse_k, self.two_over_height, self.two_over_k_height = 1 / k, 2 / height, 2 / (k * height)

    def value_(self, c: Tensor) -> Tensor:
        return _numerics.arcsin_(c).mul_(self.inverse_k).sigmoid_().sub_(0.5).mul_(self.two_over_height)

    def products(
        self, grad: Tensor, c: Tensor, h: Tensor | None, parameters: _ParameterGradients
    ) -> tuple[Tensor, Tensor | None]:
        elevation = _numerics.arcsin(c)
        sigma = torch.mul(elevation, self.inverse_k).sigmoid_()
        grad_sigma = torch.ops.aten.sigmoid_backward(grad, sigma)  # G·σ(1 − σ)
        value = None
        if parameters.needs_magnitude or parameters.value_sum is not None:
            value = sigma.sub_(0.5).mul_(self.two_over_height).mul_(grad)
        if parameters.sigma_sum is not None and parameters.value_sum is not None and value is not None:
            # The two sums of ∂k. The elevations are not used afterwards.
            elevation.mul_(grad_sigma)
            _add_sum_(parameters.sigma_sum, elevation if h is None else elevation.mul_(h))
            _add_sum_(parameters.value_sum, value if h is None else value * h)
        derivative = grad_sigma.mul_(self.two_over_k_height).mul_(_numerics.cosecant(c))
        return derivative, value if parameters.needs_magnitude else None

    def k_gradient(self, parameters: _ParameterGradients) -> Tensor | None:
        if parameters.sigma_sum is None or parameters.value_sum is None:
            return None
        k, height = self.angular.k, self.angular.height
        first, second = 2 / height * parameters.sigma_sum, (1 / height - height) * (torch.pi / 4) * parameters.value_sum
        result: Tensor = (second - first) / k.square()
        return result


# To add a faster form of another g, write a kernel and list it here.
_KERNELS: dict[type, type[_AngularKernel]] = {
    Cosine: _CosineKernel,
    LinearAngle: _LinearKernel,
    Sigmoid: _SigmoidKernel,
}


def _angular_kernel(spec: OperatorSpec) -> _AngularKernel:
    """Return the kernel of g, which is built once for all blocks."""
    return _KERNELS.get(type(spec.angular), _AngularKernel)(spec.angular)


def _cosines_from_cotangents(t: Tensor) -> Tensor:
    """Return c = t/√(1 + t²) in float32."""
    wide = t.float()
    return torch.addcmul(torch.ones((), device=t.device), wide, wide).rsqrt_().mul_(wide)


def _add_sum_(total: Tensor, values: Tensor) -> None:
    """Sum `values` (N, groups, filters per group or 1, *places) to the shape of `total` and add them to it."""
    sums = values.sum((0, *range(3, values.ndim)), keepdim=True).squeeze(0)
    total.add_(sums.sum_to_size(total.shape))


def _match_layout(grad: Tensor, like: Tensor) -> Tensor:
    """Return `grad` in the dtype and memory format of `like`, as the fake implementation promises."""
    if grad.dtype == like.dtype and grad.stride() == like.stride():
        return grad
    return torch.empty_like(like).copy_(grad)


def _empty_like(product: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor with `length` samples in the memory format of `product`."""
    strides = (product[:1].numel(), *product.stride()[1:])
    return torch.empty_strided((length, *product.shape[1:]), strides, dtype=dtype, device=product.device)
