"""`hypersphere train`: train an experiment, in one process or under torchrun, from the start or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli.options import DataRoot, Device, Threads, TrustCode
from hypersphere.cli.settings import changed_settings, with_settings
from hypersphere.cli.settings_file import read_settings
from hypersphere.training.config import Config, set_path

__all__ = ["train"]

RESUME = ("never", "auto")


@with_settings
def train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Read settings from this .yaml or .json file.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE, for example head.m=4.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write the run to.")] = Path("runs/train"),
    weights: Annotated[
        Path | None, typer.Option("--from", help="Start from the weights of this run or .safetensors file.")
    ] = None,
    resume: Annotated[str, typer.Option(help="never, or auto: continue from the last checkpoint, if any.")] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and sizes without training.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The same as --trackers tensorboard.")] = False,
    data_root: DataRoot = None,
    device: Device = None,
    threads: Threads = None,
    trust_code: TrustCode = False,
    **settings: Any,
) -> None:
    """Train a model. Options of a component take dots: --head.m=4, --optimizer.lr=0.1, --data.limit=500.

    A component is an entry of `hypersphere list`, or an import path such as my_module:Net. With N processes:
    `torchrun --nproc-per-node N -m hypersphere train …`; --head.sharded then divides the classes among them.
    """
    from hypersphere.cli.processes import restarts
    from hypersphere.cli.training import require_same_weights, train_in_folder
    from hypersphere.training.run import CONFIG, Run, refuse_existing

    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    if tensorboard:
        settings["trackers"] = settings["trackers"] or "tensorboard"
    resuming = resume == "auto" or restarts() > 0
    existing = Run.open(out) if resuming and (out / CONFIG).exists() else None
    if not resuming:
        refuse_existing(out)  # fail before the data are read
    known = [name for parameter in ctx.command.params for name in parameter.opts]

    def requested(base: Config, file: Path | None) -> Config:
        changed = changed_settings(base.settings(), file, settings, ctx.args, assignments or [], known)
        return Config.of(_absolute_paths(changed, data_root))

    chosen = requested(existing.config if existing is not None and config is None else Config(), config)
    if not trust_code:
        # What the user wrote is trusted; what comes from the folder of a run is not.
        from_run = config is not None and "format" in read_settings(config, whole=True)
        _require_trusted(chosen, requested(Config(), None if from_run else config))
    source = str(weights.expanduser().resolve()) if weights else existing.weights if existing else None
    if existing is not None:
        require_same_weights(existing, source)
    code = train_in_folder(chosen, out, existing, source, resuming, dry_run, data_root, device)
    if code:
        raise typer.Exit(code)


def _absolute_paths(settings: dict[str, Any], data_root: Path | None) -> dict[str, Any]:
    """Return settings with absolute paths of the data; paths relative to a data root are kept."""
    for option in ("path", "pairs"):
        value = settings["data"].get(option) if isinstance(settings["data"], dict) else None
        if data_root is None and isinstance(value, str):
            settings = set_path(settings, f"data.{option}", str(Path(value).expanduser().resolve()))
    return settings


def _require_trusted(config: Config, requested: Config) -> None:
    from hypersphere.training.components import foreign_code

    others = [name for name in foreign_code(config) if name not in foreign_code(requested)]
    if others:
        raise ValueError(f"the settings name code outside hypersphere ({', '.join(others)}), which needs --trust-code")
