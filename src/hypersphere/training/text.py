"""Train causal language models: windows of a text, and the loss of the next token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_integer, require

__all__ = ["NextToken", "TextWindows"]

IGNORED = -100  # the label of tokens that `F.cross_entropy` leaves out


class TextWindows:
    """Random windows of a text: tokens (batch, length), and for each the next token. One pass yields one batch.

    Args:
        tokens: the text as token ids.
        length: tokens per window.
        batch: windows per batch.
        generator: draws the starts of the windows; None for torch's global generator.

    Example:
        >>> inputs, labels = next(iter(TextWindows(torch.arange(100), length=4, batch=2)))
        >>> inputs.shape, bool((labels == inputs + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(
        self, tokens: Int[Tensor, " text"], length: int, batch: int, generator: torch.Generator | None = None
    ) -> None:
        require(is_integer(length, 1), "length", "an integer >= 1", length)
        require(is_integer(batch, 1), "batch", "an integer >= 1", batch)
        require(len(tokens) > length, "tokens", f"a text of more than {length} tokens", len(tokens))
        self.tokens, self.length, self.batch, self.generator = tokens, length, batch, generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        starts = torch.randint(len(self.tokens) - self.length, (self.batch, 1), generator=self.generator)
        windows = self.tokens[(starts + torch.arange(self.length + 1)).to(self.tokens.device)]
        yield windows[:, :-1], windows[:, 1:]


class NextToken(nn.Module):
    """The mean cross entropy of the next token, for a model that returns logits or an object with `logits`.

    Args:
        model: maps tokens (batch, length) to logits (batch, length, vocabulary).

    Example:
        >>> objective = NextToken(nn.Embedding(10, 10))
        >>> objective(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)).shape
        torch.Size([])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        inputs: Int[Tensor, "batch length"],
        labels: Int[Tensor, "batch length"],
        share: float | Tensor | None = None,
        regularize: bool = True,
    ) -> Float[Tensor, ""]:
        """Return the mean loss over all tokens, times `share` if the batch is a part of a larger one.

        There are no regularisers, so `regularize` has no effect.
        """
        output = self.model(inputs)
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss if share is None else loss * share

    def loss_denominator(self, labels: Int[Tensor, "batch length"]) -> Int[Tensor, ""]:
        """Return the number of tokens that count in the loss."""
        return (labels != IGNORED).sum()

    @torch.no_grad()
    def mean_loss(self, tokens: Int[Tensor, " text"], length: int, batch: int) -> float:
        """Return the mean loss over consecutive windows of a text, `batch` at a time, in evaluation mode."""
        count = (len(tokens) - 1) // length
        require(count > 0, "tokens", f"a text of more than {length} tokens", len(tokens))
        inputs, labels = (tokens[shift : shift + count * length].view(count, length) for shift in (0, 1))
        with evaluation_mode(self):
            parts = zip(inputs.split(batch), labels.split(batch), strict=True)
            return sum(float(self(x, y)) * len(x) for x, y in parts) / count
