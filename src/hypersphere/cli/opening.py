"""Open a run for a command: its experiment with the weights of one checkpoint, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hypersphere.cli.output import warn
from hypersphere.data import Mirrored, Pairs, Source, open_images
from hypersphere.data.images import as_floats
from hypersphere.data.sources import Subset
from hypersphere.gallery import fingerprint_of
from hypersphere.models.export import probe_batches
from hypersphere.training import Experiment, Run, RunCalibration
from hypersphere.training.components import complete_settings
from hypersphere.training.processes import choose_device

__all__ = ["LoadedRun", "open_run", "probe_inputs"]

PROBES = 32  # number of inputs on which an exported or folded network is compared with the original


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run, its experiment in evaluation mode, and the step of its weights."""

    run: Run
    experiment: Experiment
    step: int

    @cached_property
    def held_out(self) -> Source:
        """The held-out data, without files that cannot be decoded if `broken_files` of the run is "skip"."""
        source = self.experiment.data.validation
        if source is None:
            raise ValueError(f"{self.run.folder} has no held-out data")
        return self.experiment.readable(source)

    @property
    def pairs(self) -> Pairs | None:
        """The pairs that the data define, as positions in `held_out`; None if they define none."""
        split, source = self.experiment.data, self.held_out
        if split.pairs is None or source is split.validation:
            return split.pairs
        assert split.validation is not None
        new_positions = torch.full((len(split.validation),), -1)
        new_positions[cast(Subset, source).positions] = torch.arange(len(source))
        first, second = new_positions[split.pairs.first], new_positions[split.pairs.second]
        is_readable = (first >= 0) & (second >= 0)
        same, fold = split.pairs.same[is_readable], split.pairs.fold[is_readable]
        return Pairs(first[is_readable], second[is_readable], same, fold)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input of the network."""
        return self.experiment.input_shape

    @property
    def fit(self) -> str:
        """How images are resized to the shape of the inputs, as in training: "stretch" or "crop"."""
        return complete_settings(self.run.config)["data"].get("fit", "stretch")

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the network."""
        return fingerprint_of(self.experiment.network)

    def images(self, paths: Sequence[Path], what: str) -> tuple[Source, bool]:
        """Return images as inputs of the run, and whether their folders are classes; `what` as in `require_images`."""
        self.require_images(what)
        channels, height, width = self.shape
        return open_images(paths, size=(height, width), grey=channels == 1, fit=self.fit)

    def embed(self, source: Source, *, mirror: bool = False, batch: int = 500) -> tuple[Tensor, Tensor]:
        """Return features (N, d), or (N, 2d) with those of the mirrored images, and labels (N,)."""
        features, labels = self.experiment.embed(source, batch_size=batch)
        if mirror:
            self.require_images("--mirror")
            mirrored, _ = self.experiment.embed(Mirrored(source), batch_size=batch)
            features = torch.cat([features, mirrored], dim=1)
        return features, labels

    def classify(self, inputs: Tensor) -> Tensor:
        """Return the scores (N, C) of inputs, without margin, in the precision of the run."""
        objective: Any = self.experiment.objective
        return objective.head.scores(objective.features(inputs))

    def calibration(self) -> RunCalibration | None:
        """Return the calibration of the run if it applies to these weights, else None."""
        stored = self.run.calibration()
        return None if stored is None or self.refusal(stored) else stored

    def refusal(self, calibration: RunCalibration) -> str:
        """Return why a calibration does not apply to these weights; empty if it does."""
        if calibration.fingerprint == self.fingerprint:
            return ""
        return f"the calibration is that of step {calibration.step}, not of the weights of step {self.step}"

    def require_images(self, what: str) -> None:
        """Raise a `ValueError` if the run was not trained on images, which the command or option `what` needs."""
        if self.experiment.data.graph is not None or len(self.shape) != 3:
            raise ValueError(f"{what} needs a run on images, not on {self.run.config.data.name}")


def open_run(
    folder: Path,
    data_root: Path | None = None,
    *,
    step: int | str | None = None,
    device: str | None = None,
    with_data: bool = True,
    trust_code: bool = False,
) -> LoadedRun:
    """Build the experiment of a run and load a checkpoint: that of `step`, the "best", or the last intact one.

    With `with_data=False` the data of the run are not read and may be missing.

    Raises:
        ValueError: if there is no such checkpoint, the data have changed, or the run names code that is not trusted.
        DamagedCheckpoint: if the requested checkpoint, or every checkpoint, is damaged.
    """
    run, torch_device = Run.open(folder), choose_device(device)
    checkpoint = run.checkpoint(step, on_damage=warn)
    experiment = run.experiment(
        data_root, step=checkpoint, with_data=with_data, device=torch_device, trust_code=trust_code
    )
    return LoadedRun(run, experiment, checkpoint.step)


def probe_inputs(experiment: Experiment, *, as_bytes: bool = False) -> list[Tensor]:
    """Return batches on which to compare an exported or folded network with the original, see `probe_batches`.

    Images are floats in [0, 1], or uint8 with `as_bytes`. For a graph, one batch has all nodes.
    """
    split = experiment.data
    if split.graph is not None:
        return [torch.arange(len(split.graph.features))]
    inputs = torch.stack([split.train[index] for index in range(min(PROBES, len(split.train)))])
    # The network may take smaller windows, which an augmentation cuts from the training images.
    window = (slice(None), *map(slice, experiment.input_shape))
    inputs = inputs[window]
    return probe_batches(inputs if as_bytes else as_floats(inputs))
