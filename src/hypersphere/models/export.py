"""Write a module as ONNX or as a torch.export program with a variable batch size, and compare its outputs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere._files import replacing
from hypersphere._validation import require, require_package
from hypersphere.evaluation import Calibration

__all__ = ["SUFFIXES", "FeaturesAndScores", "PairScores", "export_module", "largest_difference", "probe_batches"]

Outputs = Sequence[Tensor]
Inputs = Tensor | tuple[Tensor, ...]
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}


class FeaturesAndScores(nn.Module):
    """A network and its head as one module with two outputs: features (B, d), and scores (B, C) without margin.

    It computes in the dtype of the parameters, without autocast: in bfloat16, rounding differences between two correct
    forms of a network would exceed the errors that a comparison has to detect.
    """

    def __init__(self, network: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.head: Any = head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and scores."""
        features = self.network(inputs)
        return features, self.head.scores(features)

    @torch.no_grad()
    def outputs(self, batches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return features and scores of each batch."""
        return [self(batch) for batch in batches]


class PairScores(nn.Module):
    """A calibration as a module, which maps corresponding rows of two matrices of embeddings to scores.

    The outputs are the cosine, the natural log-likelihood ratio ℓ of "same", and the probability of "same",
    σ(ℓ + log[π/(1 − π)]) with the prior π of the calibration. All are vectors (N,).

    Example:
        >>> calibration = Calibration.fit([0.1, 0.2, 0.6, 0.4, 0.8, 0.9], [0, 0, 0, 1, 1, 1])
        >>> cosine, llr, probability = PairScores(calibration)(torch.eye(2), torch.eye(2))
        >>> cosine.tolist(), bool((probability == calibration.probability(1.0).float()).all())
        ([1.0, 1.0], True)
    """

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        require(calibration.quality is None, "calibration", "a calibration without qualities", calibration)
        self.method = calibration.method
        numbers = calibration.to_dict()["map"]
        if self.method == "logistic":
            line = (numbers["slope"], numbers["intercept"])
        else:
            # Both ends of each isotonic block, ascending, with its probability; interpolation is linear in between.
            ends = [end for block in zip(numbers["low"], numbers["high"], strict=True) for end in block]
            self.register_buffer("ends", torch.tensor(ends, dtype=torch.float64))
            steps = torch.tensor(numbers["probabilities"], dtype=torch.float64).repeat_interleave(2)
            self.register_buffer("steps", steps)
            line = (1.0, -numbers["odds"])
        prior = calibration.prior
        self.register_buffer("line", torch.tensor(line, dtype=torch.float64))
        self.register_buffer("prior_odds", torch.tensor(prior, dtype=torch.float64).logit())

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines, log-likelihood ratios and probabilities in the dtype of the embeddings."""
        # Float64, because a steep calibration magnifies rounding errors of the cosine.
        cosine = sphere.cosine(first.double(), second.double())
        # `cosine` recognises zero vectors by the smallest float64 number, which ONNX runtimes may round to zero.
        is_zero = (first == 0).all(1) | (second == 0).all(1)
        cosine = cosine.masked_fill(is_zero, 0.0)
        evidence = cosine if self.method == "logistic" else self._isotonic(cosine)
        llr = self.line[0] * evidence + self.line[1]  # type: ignore[index]
        probability = torch.sigmoid(llr + self.prior_odds)  # type: ignore[operator]
        return cosine.to(first.dtype), llr.to(first.dtype), probability.to(first.dtype)

    def _isotonic(self, cosine: Tensor) -> Tensor:
        """Return the logit of "same" at the proportion of same pairs that the calibration was fitted to."""
        ends, steps = self.ends, self.steps
        clamped = cosine.clamp(ends[0], ends[-1])  # type: ignore[index]
        right = (ends < clamped[:, None]).sum(1).clamp(1, len(ends) - 1)  # type: ignore[arg-type,operator]
        low, width = ends[right - 1], ends[right] - ends[right - 1]  # type: ignore[index]
        fraction = torch.where(width > 0, (clamped - low) / torch.where(width > 0, width, 1.0), 0.0)
        probability = steps[right - 1] + fraction * (steps[right] - steps[right - 1])  # type: ignore[index]
        return probability.log() - (1 - probability).log()


def export_module(
    model: nn.Module,
    batches: Sequence[Inputs],
    path: Path,
    *,
    form: str,
    outputs: Sequence[str],
    inputs: Sequence[str] = ("inputs",),
    expected: Sequence[Outputs] | None = None,
    tolerance: float = 1e-4,
) -> float:
    """Write a module and return the largest difference between its outputs and those of the written file.

    Args:
        model: a module with inputs (N, …) and a tuple of outputs, in evaluation mode.
        batches: inputs for the comparison, tensors or tuples of them; they may have different N, and the first is used
            for tracing.
        path: file to write; it is not written if the outputs differ.
        form: "onnx" or "torch".
        outputs: names of the outputs.
        inputs: names of the inputs.
        expected: outputs for each batch; by default those of the model.
        tolerance: accepted difference, relative to the largest entry of each output.

    Raises:
        ValueError: if the model cannot be exported, or the outputs differ by more than the tolerance.
    """
    require(form in SUFFIXES, "form", f"one of {', '.join(SUFFIXES)}", form)
    if form == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package(package, package, "onnx")
    if expected is None:
        with torch.no_grad():
            expected = [model(*_as_tuple(batch)) for batch in batches]
    with replacing(path) as draft:
        try:
            with _quiet():
                write = partial(_write_onnx, inputs=inputs) if form == "onnx" else _write_program
                write(model, _as_tuple(batches[0]), draft, outputs)
                run = (_onnx_reader if form == "onnx" else _program_reader)(draft, outputs)
                difference = largest_difference(expected, [run(*_as_tuple(batch)) for batch in batches])
        except OSError:
            raise
        except Exception as error:  # exporters raise many kinds of errors
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model cannot be exported to {form}: {reason}") from error
        accepted = f"within {tolerance:g} of those of the model"
        require(difference <= tolerance, "exported outputs", accepted, difference)
    return difference


def probe_batches(inputs: Tensor) -> list[Tensor]:
    """Return batches to compare two forms of a network: the inputs, random ones in the same range, and a single one.

    >>> [tuple(batch.shape) for batch in probe_batches(torch.rand(4, 3))]
    [(4, 3), (4, 3), (1, 3)]
    """
    generator = torch.Generator().manual_seed(0)
    if inputs.dtype == torch.uint8:
        random = torch.randint(256, inputs.shape, generator=generator, dtype=torch.uint8)
    else:
        low, high = inputs.min(), inputs.max()
        random = low + (high - low) * torch.rand(inputs.shape, generator=generator)
    return [inputs, random, random[:1]]  # also a batch of one, because the exported batch size must be variable


def largest_difference(ones: Sequence[Outputs], others: Sequence[Outputs]) -> float:
    """Return the largest difference between two lists of outputs, relative to the largest entry of each output.

    >>> largest_difference([[torch.tensor([100.0])]], [[torch.tensor([101.0])]])
    0.01
    """
    worst = 0.0
    for outputs, other_outputs in zip(ones, others, strict=True):
        for a, b in zip(outputs, other_outputs, strict=True):
            scale = float(a.abs().max()) or 1.0
            difference = float((a - b).abs().max()) / scale
            worst = difference if not difference <= worst else worst  # NaN counts as the largest difference
    return worst


def _as_tuple(batch: Inputs) -> tuple[Tensor, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _write_onnx(
    model: nn.Module, example: tuple[Tensor, ...], path: Path, outputs: Sequence[str], inputs: Sequence[str]
) -> None:
    program = torch.onnx.export(
        model,
        example,
        dynamo=True,
        dynamic_shapes=_dynamic_shapes(example),
        input_names=list(inputs),
        output_names=list(outputs),
        verbose=False,
    )
    assert program is not None
    program.save(path, external_data=False)


def _dynamic_shapes(example: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """Return shapes in which the first dimension of all inputs is the same variable batch size."""
    batch = torch.export.Dim("batch")
    return tuple({0: batch} for _ in example)


def _onnx_reader(path: Path, outputs: Sequence[str]) -> Callable[..., Outputs]:
    """Return a function that runs an ONNX file on a batch."""
    runtime = require_package("onnxruntime", "onnxruntime", "onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*batch: Tensor) -> Outputs:
        feed = {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)}
        return tuple(map(torch.from_numpy, session.run(list(outputs), feed)))

    return run


def _write_program(model: nn.Module, example: tuple[Tensor, ...], path: Path, outputs: Sequence[str]) -> None:
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=_dynamic_shapes(example))
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())


def _program_reader(path: Path, outputs: Sequence[str]) -> Callable[..., Outputs]:
    """Return a function that runs a torch.export program on a batch."""
    return torch.export.load(io.BytesIO(path.read_bytes())).module()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs and warnings of the exporters; errors are still raised."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
