r"""Few-shot classification by fine-tuning: a new classifier for a few examples of new classes, on fixed features.

An episode draws some classes, a few labelled examples of each (the support), and other examples to classify (the
queries). The features stay as they are; only a classifier is trained on the support.

Reference:
    Chen et al., A Closer Look at Few-shot Classification, ICLR 2019 (baseline and baseline++); OPT, appendix D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.evaluation._arrays import Array, as_features, as_labels

__all__ = ["Episodes", "FewShot", "draw_episodes", "few_shot"]

EPISODES_AT_ONCE = 50  # classifiers that are trained together


@dataclass(frozen=True, eq=False)
class Episodes:
    """Positions of the examples of episodes. Entry [e, w, i] is example i of way w in episode e.

    Attributes:
        support: labelled examples.
        queries: examples to classify; none of them is in the support of its episode.
    """

    support: Int64[Tensor, "episodes ways shots"]
    queries: Int64[Tensor, "episodes ways queries"]


@dataclass(frozen=True, eq=False)
class FewShot:
    """Result of `few_shot`.

    Attributes:
        accuracies: fraction of queries of each episode that were classified correctly.
    """

    accuracies: Float[Tensor, " episodes"]

    @property
    def accuracy(self) -> float:
        """Mean accuracy over episodes."""
        return float(self.accuracies.mean())

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean, 1.96 σ/√E."""
        return 1.96 * float(self.accuracies.std(correction=0)) / math.sqrt(len(self.accuracies))


def draw_episodes(
    labels: Array,
    *,
    ways: int = 5,
    shots: int = 5,
    queries: int = 16,
    episodes: int = 600,
    generator: torch.Generator | None = None,
) -> Episodes:
    """Draw the classes and the examples of a number of episodes.

    Args:
        labels: the class of each example.
        ways: number of classes per episode.
        shots: number of labelled examples per class.
        queries: number of examples per class to classify.
        episodes: number of episodes.
        generator: source of randomness; the global one if None.

    Example:
        >>> drawn = draw_episodes([0, 0, 1, 1, 2, 2], ways=2, shots=1, queries=1, episodes=3)
        >>> drawn.support.shape, drawn.queries.shape
        (torch.Size([3, 2, 1]), torch.Size([3, 2, 1]))
    """
    codes = as_labels("labels", labels, None, torch.device("cpu"))
    for name, value, least in (("ways", ways, 2), ("shots", shots, 1), ("queries", queries, 1)):
        require(is_integer(value, least), name, f"an integer >= {least}", value)
    require(is_integer(episodes, 1), "episodes", "an integer >= 1", episodes)
    examples = [(codes == code).nonzero().flatten() for code in codes.unique()]
    examples = [positions for positions in examples if len(positions) >= shots + queries]
    if len(examples) < ways:
        needed = f"{ways} classes with {shots + queries} or more examples (shots + queries)"
        raise ValueError(f"labels must contain at least {needed}, but has {len(examples)}")
    drawn = torch.empty(episodes, ways, shots + queries, dtype=torch.int64)
    for episode in range(episodes):
        for way, class_index in enumerate(torch.randperm(len(examples), generator=generator)[:ways].tolist()):
            order = torch.randperm(len(examples[class_index]), generator=generator)[: shots + queries]
            drawn[episode, way] = examples[class_index][order].cpu()
    return Episodes(drawn[:, :, :shots], drawn[:, :, shots:])


def few_shot(
    features: Array,
    labels: Array,
    *,
    ways: int = 5,
    shots: int = 5,
    queries: int = 16,
    episodes: int = 600,
    scale: float | None = None,
    epochs: int = 100,
    batch_size: int = 4,
    lr: float = 0.01,
    momentum: float = 0.9,
    dampening: float = 0.9,
    weight_decay: float = 1e-3,
    generator: torch.Generator | None = None,
) -> FewShot:
    r"""Fine-tune a classifier on the support of each episode and classify its queries.

    The scores are w·x + b (baseline), or with a `scale` c·cos(w, x) (baseline++). The classifier is initialised at
    random and trained by SGD with softmax and cross-entropy. The defaults are those of the OPT paper (appendix D).

    Args:
        features: (N, d), of examples of classes that the network has not seen.
        labels: their classes.
        ways, shots, queries, episodes: see `draw_episodes`.
        scale: c, or None for a linear classifier.
        epochs, batch_size, lr, momentum, dampening, weight_decay: settings of SGD.
        generator: CPU generator for episodes, initial values and batches; the global one if None.

    Example:
        >>> labels = torch.arange(6).repeat_interleave(30)
        >>> few_shot(torch.eye(6)[labels], labels, episodes=2, scale=2.0).accuracy
        1.0
    """
    rows = as_features("features", features).float()
    require(scale is None or (is_number(scale, 0) and scale > 0), "scale", "None or a positive number", scale)
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        require(is_integer(value, 1), name, "an integer >= 1", value)
    codes = as_labels("labels", labels, len(rows), torch.device("cpu"))
    drawn = draw_episodes(codes, ways=ways, shots=shots, queries=queries, episodes=episodes, generator=generator)
    inputs = rows if scale is None else sphere.normalize(rows)
    options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    accuracies = []
    for start in range(0, episodes, EPISODES_AT_ONCE):
        part = slice(start, start + EPISODES_AT_ONCE)
        support, query_inputs = (
            inputs[positions[part].flatten(1).to(rows.device)] for positions in (drawn.support, drawn.queries)
        )
        classifier = _Classifiers(len(support), ways, rows.shape[1], scale, generator).to(rows.device)
        _fit(classifier, support, shots, epochs=epochs, batch_size=batch_size, generator=generator, **options)
        with torch.no_grad():
            query_labels = torch.arange(ways, device=rows.device).repeat_interleave(queries)
            accuracies.append((classifier(query_inputs).argmax(2) == query_labels).double().mean(1).cpu())
    return FewShot(torch.cat(accuracies))


class _Classifiers(torch.nn.Module):
    """One classifier per episode: inputs (episodes, examples, d) to scores (episodes, examples, ways)."""

    def __init__(
        self, episodes: int, ways: int, dim: int, scale: float | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        # The initial values of torch.nn.Linear.
        bound = 1 / math.sqrt(dim)
        weight, bias = (
            torch.empty(shape).uniform_(-bound, bound, generator=generator)
            for shape in ((episodes, ways, dim), (episodes, 1, ways))
        )
        self.scale = scale
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(bias) if scale is None else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scale is None:
            return inputs @ self.weight.mT + cast(Tensor, self.bias)
        return self.scale * inputs @ sphere.normalize(self.weight).mT


@torch.enable_grad()
def _fit(
    classifier: _Classifiers,
    support: Tensor,
    shots: int,
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator | None,
    **options: Any,
) -> None:
    """Train all classifiers at once. Their losses are added, so that no gradient depends on another episode."""
    episodes, examples, _ = support.shape
    labels = torch.arange(examples // shots).repeat_interleave(shots).to(support.device)
    optimizer = torch.optim.SGD(classifier.parameters(), **options)
    for _ in range(epochs):
        # A separate order for each episode.
        orders = torch.rand(episodes, examples, generator=generator).argsort(1).to(support.device)
        for batch in orders.split(batch_size, dim=1):
            batch_inputs = support.gather(1, batch[:, :, None].expand(-1, -1, support.shape[2]))
            scores = classifier(batch_inputs)
            optimizer.zero_grad()
            loss = F.cross_entropy(scores.flatten(0, 1), labels[batch].flatten(), reduction="sum") / batch.shape[1]
            loss.backward()
            optimizer.step()
