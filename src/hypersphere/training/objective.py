"""The objective of training: the loss of a head on the features of a network, plus regularisers, as one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require
from hypersphere.robustness import Attack, adversarial_loss

__all__ = ["Objective"]


class Objective(nn.Module):
    """Map inputs and labels to the loss of a head on the features of a network, plus regularisers.

    As a single module it can be passed to DDP, `torch.compile` and hooks.

    Args:
        network: maps inputs to features.
        head: maps features and labels to a scalar loss.
        regularizers: modules or functions without arguments.
        precision: autocast dtype of the network; losses and regularisers are computed in float32.
        attack: attack for adversarial training, or None.
        attack_weight: weight of the attacked inputs in the loss, see `hypersphere.robustness.adversarial_loss`.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        regularizers: Sequence[Callable[[], Tensor]] = (),
        *,
        precision: torch.dtype = torch.float32,
        attack: Attack | None = None,
        attack_weight: float = 0.5,
    ) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.regularizers = nn.ModuleList([r for r in regularizers if isinstance(r, nn.Module)])
        self.penalties = [r for r in regularizers if not isinstance(r, nn.Module)]  # functions cannot be submodules
        self.precision = precision
        self.attack, self.attack_weight = attack, attack_weight

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs to features, in float32."""
        with self._autocast(inputs):
            features = self.network(inputs)
        if not isinstance(features, Tensor):
            advice = "wrap it in hypersphere.models.Embedder, or select one of its outputs"
            raise TypeError(f"the model must return a tensor of features, not {type(features).__name__}; {advice}")
        return features if self.precision == torch.float32 else features.float()

    def forward(
        self, inputs: Tensor, labels: Tensor, share: float | Tensor | None = None, regularize: bool = True
    ) -> Tensor:
        """Return the loss.

        Args:
            inputs, labels: a batch.
            share: factor of the loss of the head, for a batch that is a part of a larger one.
            regularize: False to leave out the regularisers.
        """
        if self.attack is None or not self.training:
            loss = self.head(self.features(inputs), labels)
        else:
            # The gradients of images would underflow in float16, so attacks then compute in float32.
            model = self.features if self.precision == torch.bfloat16 else self.network
            with evaluation_mode(self.network):
                attacked = self.attack(model, inputs, labels, self.head)
            loss = adversarial_loss(
                self.features,
                inputs,
                labels,
                loss=self.head,
                attack=lambda *_: attacked,  # computed above, in evaluation mode
                weight=self.attack_weight,
            )
        # Regularisers do not depend on the batch. They are added once per step, without this factor.
        loss = loss if share is None else loss * share
        for regularizer in (*self.regularizers, *self.penalties) if regularize else ():
            term = regularizer()
            require(isinstance(term, Tensor | float | int), "regularizers", "functions that return a number", term)
            loss = loss + term
        return loss

    def loss_denominator(self, labels: Tensor) -> float | Tensor:
        """Return the denominator of the mean loss of a batch: its number of labels, or the sum of class weights."""
        head: Any = self.head
        if getattr(head, "reduction", "mean") == "sum":
            return 1.0
        class_weights = getattr(head, "class_weights", None)
        is_counted = labels != getattr(head, "ignore_index", -100)
        if class_weights is None:
            return is_counted.sum()
        return class_weights[labels[is_counted].to(class_weights.device)].sum()

    def _autocast(self, inputs: Tensor) -> AbstractContextManager[Any]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(inputs.device.type, self.precision)
