"""`hypersphere train`: train an experiment, in one process or under torchrun, from the start or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.settings import changed_settings, with_settings
from hypersphere.training.config import CONFIG, Config
from hypersphere.training.settings_file import is_config_of_run

__all__ = ["train"]

RESUME = ("never", "auto")  # values of --resume


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
    data_root: options.DataRoot = None,
    device: options.Device = None,
    threads: options.Threads = None,
    trust_code: options.TrustCode = False,
    **settings: Any,
) -> None:
    """Train a model. Options of a component take dots: --head.m=4, --optimizer.lr=0.1, --data.limit=500.

    A component is an entry of `hypersphere list`, or an import path such as my_module:Net. With N processes:
    `torchrun --nproc-per-node N -m hypersphere train …`; --head.sharded then divides the classes among them.
    """
    from hypersphere.cli.training import train_in_folder
    from hypersphere.training.components import check_components, foreign_code
    from hypersphere.training.processes import restarts
    from hypersphere.training.run import Run, run_without_checkpoint

    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    if tensorboard:
        settings["trackers"] = [*(settings["trackers"] or []), "tensorboard"]
    require(not out.is_file(), "--out", "a folder", str(out))
    resuming = resume == "auto" or restarts() > 0
    existing = Run.open(out) if resuming and (out / CONFIG).exists() else None
    option_names = [name for parameter in ctx.command.params for name in parameter.opts]

    def with_changes(base: Config, file: Path | None) -> Config:
        """Return a config with the settings of a file and of the command line."""
        return Config.of(changed_settings(base.settings(), file, settings, ctx.args, assignments or [], option_names))

    try:
        chosen = with_changes(existing.config if existing is not None and config is None else Config(), config)
    except ValueError:
        if config is not None:
            Config.read(config)  # if the file itself is invalid, the error names it
        raise
    _refuse_folder_as_name(chosen, data_root)
    if not trust_code:
        # What the user wrote is trusted; what comes from the folder of a run is not.
        from_run = config is not None and is_config_of_run(config)
        trusted = foreign_code(with_changes(Config(), None if from_run else config))
        untrusted = ", ".join(name for name in foreign_code(chosen) if name not in trusted)
        if untrusted:
            raise ValueError(f"the settings name code outside hypersphere ({untrusted}), which needs --trust-code")
    check_components(chosen)
    # Settings are checked before the folder, and the folder before the data are read.
    failed = None if resuming else run_without_checkpoint(out)
    source = str(weights.expanduser().resolve()) if weights else existing.weights if existing else None
    code = train_in_folder(
        chosen,
        out,
        existing=existing,
        failed=failed,
        source=source,
        resuming=resuming,
        dry_run=dry_run,
        data_root=data_root,
        device=device,
    )
    if code:
        raise typer.Exit(code)


def _refuse_folder_as_name(config: Config, data_root: Path | None) -> None:
    """Raise a `ValueError` that says how to train on a folder if `--data` is one instead of a name."""
    from hypersphere.training.components import MENUS

    name = config.data.name
    if name not in MENUS["data"] and ((data_root or Path()) / name).expanduser().is_dir():
        accepted = "a name of `hypersphere list data-sets`"
        suggestion = f"did you mean --data image_folder --data.path={name}?"
        raise ValueError(f"--data must be {accepted}, not the folder {name!r}; {suggestion}")
