r"""Adversarial attacks: images x̃ close to x that a model misclassifies.

An attack is called with a model, images (B, …) in [0, 1] and their true labels, and returns images of the same shape.
The model is any callable that maps images to logits. If the loss is a head of `hypersphere.heads`, the model maps
images to features instead. Modules are attacked in evaluation mode; their modes, gradients and buffers do not change.
To add an attack, write a frozen dataclass that inherits from `Attack`, and list it in ATTACKS.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere._modes import evaluation_mode
from hypersphere._numerics import values_readable
from hypersphere._validation import is_integer, is_number, require

__all__ = ["ATTACKS", "BIM", "FGSM", "Attack", "AttackFunction", "Classifier", "DeepFool", "Foolbox", "Loss", "Model"]

Model: TypeAlias = Callable[[Tensor], Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
AttackFunction: TypeAlias = Callable[..., Tensor]
"""An `Attack`, or any callable with the same arguments."""


class Attack(abc.ABC):
    """Base class of all attacks. A subclass defines `perturb`."""

    def __call__(
        self,
        model: Model,
        images: Num[Tensor, "batch ..."],
        labels: Int[Tensor, " batch"],
        /,
        loss: Loss = F.cross_entropy,
    ) -> Float[Tensor, "batch ..."]:
        """Return attacked images in [0, 1].

        Args:
            model: maps images to logits, or to features if the loss is a head.
            images: (B, …) in [0, 1].
            labels: (B,), the true classes.
            loss: the function of outputs and labels that the attack increases. `DeepFool` and `Foolbox` ignore it.
        """
        require(callable(model), "model", "a callable that maps images to logits", model)
        _check_batch(images, labels)
        with evaluation_mode(model, loss):
            return self.perturb(model, images.detach(), labels.long(), loss)

    @abc.abstractmethod
    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images, given a valid batch and a model in evaluation mode."""


@dataclass(frozen=True)
class FGSM(Attack):
    r"""Fast gradient sign method: one step x̃ = x + ε·sign ∇ₓJ(x, y) that increases the loss J (thesis, C.1.2).

    The result is clipped to [0, 1].

    Args:
        epsilon: ε, the change of every pixel.

    Example:
        >>> images, labels = torch.full((1, 2), 0.5), torch.tensor([0])
        >>> FGSM(epsilon=0.1)(lambda x: x, images, labels)
        tensor([[0.4000, 0.6000]])
    """

    epsilon: float = 8 / 255

    def __post_init__(self) -> None:
        require(is_number(self.epsilon, 0, 1), "epsilon", "a number in [0, 1]", self.epsilon)

    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images."""
        return BIM(self.epsilon, self.epsilon, steps=1).perturb(model, images, labels, loss)


@dataclass(frozen=True)
class BIM(Attack):
    r"""Basic iterative method: repeated FGSM steps, clipped to within ε of the original image (thesis, C.1.2).

        x̃ ← clip_{x, ε}(x̃ + τ·sign ∇J(x̃, y))

    The result is also clipped to [0, 1].

    Args:
        epsilon: ε, the largest change of a pixel.
        step: τ, the change of a pixel per step.
        steps: number of steps.

    Example:
        >>> images, labels = torch.full((1, 2), 0.5), torch.tensor([0])
        >>> BIM(epsilon=0.1, step=0.04, steps=20)(lambda x: x, images, labels)
        tensor([[0.4000, 0.6000]])
    """

    epsilon: float = 8 / 255
    step: float = 2 / 255
    steps: int = 20

    def __post_init__(self) -> None:
        require(is_number(self.epsilon, 0, 1), "epsilon", "a number in [0, 1]", self.epsilon)
        require(is_number(self.step, 0, 1), "step", "a number in [0, 1]", self.step)
        require(is_integer(self.steps, 1), "steps", "an integer >= 1", self.steps)

    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images."""
        # The intersection of both constraints: within ε of the image and inside [0, 1].
        low, high = (images - self.epsilon).clamp(min=0), (images + self.epsilon).clamp(max=1)
        attacked = images
        for _ in range(self.steps):
            gradient = _image_gradient(model, attacked, labels, loss)
            attacked = (attacked + self.step * gradient.sign()).clamp(low, high)
        return attacked


@dataclass(frozen=True)
class DeepFool(Attack):
    r"""DeepFool: repeated steps to the nearest class boundary of the linearised model, until the class changes.

    Let f_k be the logit of class k minus that of the true class, and w_k its gradient. Towards the class k with the
    nearest boundary, a step is (|f_k|/‖w_k‖²)·w_k for "l2" and (|f_k|/‖w_k‖₁)·sign w_k for "linf". Images that are
    misclassified from the start do not change.

    Args:
        norm: "l2" or "linf", the norm in which the perturbation should be small.
        steps: maximum number of steps.
        overshoot: the perturbation is extended by this fraction, to end beyond the boundary.
        candidates: number of classes with the highest logits that are considered, including the true class.
        nudge: added to the length of each step, so that rounding cannot keep an image on the boundary.

    Example:
        >>> images, labels = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
        >>> DeepFool(overshoot=0.02, nudge=0.0)(lambda x: x, images, labels)
        tensor([[0.4980, 0.5020]])

    Reference:
        Moosavi-Dezfooli et al., DeepFool, CVPR 2016.
    """

    norm: str = "l2"
    steps: int = 50
    overshoot: float = 0.02
    candidates: int = 10
    nudge: float = 1e-4

    def __post_init__(self) -> None:
        require(self.norm in ("l2", "linf"), "norm", "'l2' or 'linf'", self.norm)
        require(is_integer(self.steps, 1), "steps", "an integer >= 1", self.steps)
        require(is_number(self.overshoot, 0), "overshoot", "a number >= 0", self.overshoot)
        require(is_integer(self.candidates, 2), "candidates", "an integer >= 2", self.candidates)
        require(is_number(self.nudge, 0), "nudge", "a number >= 0", self.nudge)

    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images."""
        attacked, perturbation = images.clone(), torch.zeros_like(images)
        active = torch.arange(len(images), device=images.device)  # images that are still classified correctly
        candidates: Tensor | None = None
        for _ in range(self.steps if len(images) else 0):
            with torch.inference_mode(False), torch.enable_grad():
                x = _differentiable_copy(attacked[active])
                logits = model(x)
                if candidates is None:
                    are_logits = logits.ndim == 2 and logits.shape[1] >= 2
                    accepted = "a function from images to logits (B, C) of two or more classes"
                    require(are_logits, "model", accepted, tuple(logits.shape))
                    # The candidates are chosen once, from the logits of the original images. The true class is the
                    # first of them, even if another logit is equal.
                    true_classes = labels.clamp(0, logits.shape[1] - 1).unsqueeze(1)
                    ordered = logits.detach().scatter(1, true_classes, torch.inf)
                    candidates = ordered.topk(min(self.candidates, logits.shape[1])).indices
                is_correct = logits.argmax(1) == labels[active]
                if not is_correct.any():
                    break
                # f_k: differences to the logit of the true class, the first candidate.
                candidate_logits = logits.gather(1, candidates[active])
                gaps = candidate_logits[:, 1:] - candidate_logits[:, :1]
                # w_k needs one backward pass per candidate through the same graph. The gradient of a sum over the batch
                # holds the gradient of each image, because images do not depend on one another in evaluation mode.
                gradients = [torch.autograd.grad(gap.sum(), x, retain_graph=True)[0] for gap in gaps.unbind(1)]
            # Images that are misclassified now are finished.
            active = active[is_correct]
            step = self._step(gaps.detach()[is_correct], torch.stack(gradients, 1)[is_correct].flatten(2))
            perturbation[active] += step.view_as(perturbation[active])
            # The overshoot extends the sum of all steps, so it does not accumulate.
            attacked[active] = (images[active] + (1 + self.overshoot) * perturbation[active]).clamp(0, 1)
        return attacked

    def _step(
        self, gaps: Float[Tensor, "batch classes"], gradients: Float[Tensor, "batch classes pixels"]
    ) -> Float[Tensor, "batch pixels"]:
        """Return the shortest step to a point where one of the linearised gaps is zero."""
        # A step of length t in the steepest direction changes the linearised gap by t·slope. The slope is the dual norm
        # of the gradient: ℓ₁ if the step is measured in ℓ∞, and ℓ₂ if it is measured in ℓ₂.
        if self.norm == "linf":
            slope, direction = gradients.abs().sum(2), gradients.sign()
        else:
            lengths, direction = sphere.polar(gradients)
            slope = lengths.squeeze(2)
        flat = slope == 0  # no step changes this gap
        distance = (gaps.abs() / slope.masked_fill(flat, 1.0)).masked_fill(flat, torch.inf)
        shortest, nearest_class = distance.min(1)
        length = (shortest + self.nudge).masked_fill(shortest.isinf(), 0.0)  # all gaps are flat: do not move
        return length.unsqueeze(1) * direction[torch.arange(len(length), device=length.device), nearest_class]


@dataclass(frozen=True)
class Foolbox(Attack):
    """An attack of the library foolbox (extra `attack`), applied to any callable model.

    Args:
        attack: an attack of `foolbox.attacks`, which also defines the loss.
        epsilon: the largest perturbation, in the norm of the attack; None for attacks that minimise it.

    Example: `Foolbox(foolbox.attacks.L2CarliniWagnerAttack())(model, images, labels)`.
    """

    attack: Any
    epsilon: float | None = None

    def perturb(self, model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return attacked images."""
        from foolbox.models.pytorch import PyTorchModel

        # foolbox accepts only modules and warns in training mode. Here `eval` affects only the wrapper.
        target = PyTorchModel(_IsolatedModel(model).eval(), bounds=(0, 1), device=images.device)
        _, attacked, _ = self.attack(target, images, labels, epsilons=self.epsilon)
        return attacked.detach()


class _IsolatedModel(nn.Module):
    """A model whose output is differentiable with respect to its input only.

    foolbox calls `backward`, which would otherwise accumulate gradients in the parameters.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.hidden_model = [model]  # in a list, so that it is not registered as a submodule and `eval` skips it

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the model."""
        return _InputGradientOnly.apply(x, self.hidden_model[0])


class _InputGradientOnly(torch.autograd.Function):
    """Call a model in a separate graph and differentiate that graph with respect to the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Model) -> Tensor:
        with torch.enable_grad():  # a custom function runs forward without a graph
            ctx.x = x.detach().requires_grad_()
            ctx.output = model(ctx.x)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return torch.autograd.grad(ctx.output, ctx.x, grad_output)[0], None


ATTACKS: dict[str, type[Attack]] = {"fgsm": FGSM, "bim": BIM, "deepfool": DeepFool}


class Classifier(nn.Module):
    """A model followed by its head. It maps images to scores without margin, as attacks need them.

    Args:
        model: maps images to features.
        head: maps features to scores, by its method `scores` if it has one, else by calling it.

    Example:
        >>> Classifier(nn.Flatten(), nn.Linear(4, 3))(torch.rand(2, 1, 2, 2)).shape
        torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, images: Num[Tensor, "batch ..."]) -> Float[Tensor, "batch classes"]:
        """Map images (B, …) to scores (B, C)."""
        score: Callable[[Tensor], Tensor] = getattr(self.head, "scores", self.head)
        return score(self.model(images))


def _check_batch(images: Tensor, labels: Tensor) -> None:
    """Raise a `ValueError` unless images are floating-point numbers in [0, 1] with one label each."""
    is_real = isinstance(images, Tensor) and images.is_floating_point()
    require(is_real, "images", "a floating-point tensor", images.dtype if isinstance(images, Tensor) else type(images))
    are_labels = isinstance(labels, Tensor) and labels.shape == images.shape[:1]
    are_labels = are_labels and not labels.is_floating_point() and labels.dtype != torch.bool
    accepted = f"a vector of integers, one for each of the {len(images)} images"
    received = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels)
    require(are_labels, "labels", accepted, received)
    if images.numel() and values_readable(images):
        low, high = (float(value) for value in images.aminmax())
        require(low >= 0 and high <= 1, "images", "numbers in [0, 1]", (low, high))  # NaN fails too


def _image_gradient(model: Model, images: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return ∂loss(model(x), y)/∂x without changing the gradients stored in parameters.

    >>> _image_gradient(lambda x: 3 * x, torch.tensor([[0.5]]), torch.tensor([0]), lambda output, y: output.sum())
    tensor([[3.]])
    """
    # The caller may be in inference mode or under no_grad. `autograd.grad` does not touch the `.grad` of parameters.
    with torch.inference_mode(False), torch.enable_grad():
        x = _differentiable_copy(images)
        value = loss(model(x), _differentiable_copy(labels))
        require(value.requires_grad, "model", "differentiable with respect to images", "constant")
        (gradient,) = torch.autograd.grad(value, x)
    return gradient


def _differentiable_copy(tensor: Tensor) -> Tensor:
    """Return a copy that autograd can use. A tensor created in inference mode cannot be saved for backward."""
    with torch.inference_mode(False):
        copy = tensor.detach().clone()
        return copy.requires_grad_() if copy.is_floating_point() else copy
