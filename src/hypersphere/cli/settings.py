"""Read settings from options, settings files and dotted arguments, and print them as the JSON of `--dry-run`.

The options are derived from the fields of `Config`. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere._validation import nearest_name, require
from hypersphere.training.config import Config, Embedding, Validation, merge, parse_value, set_path
from hypersphere.training.settings_file import is_config_of_run, read_settings

__all__ = ["assignment", "changed_settings", "fill_lines", "json_block", "settings_json", "with_settings"]

Change = tuple[str, Any]  # the dotted path of a setting, and its value
GROUPS = {"Embedding": Embedding, "Validation": Validation}  # settings that are groups of settings
# The first setting of each section of the help. `Config` declares the settings in the order of the sections.
PANELS = {"data": "Data", "model": "Model", "optimizer": "Training", "validation": "Measurements and files"}
FREE_KEYS = ("data", "model")  # their options can be mappings with any keys, such as names of classes
WIDTH = 116  # columns of printed settings
METAVARS = {"int": "INTEGER", "float": "NUMBER", "bool": None, "str": "TEXT", "Component": "NAME"}
OTHER_NAMES = {  # names of options in other libraries, and the option here
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "margin": "head.m",
    "m": "head.m",
    "s": "head.s",
    "scale": "head.s",
    "feature_dim": "embedding.dim",
    "embedding_size": "embedding.dim",
    "wandb": "trackers wandb",
    "fp16": "precision float16",
    "bf16": "precision bfloat16",
    "early_stopping": "validation.patience",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes `**settings`: typer then sees one option per setting."""
    signature = inspect.signature(command, eval_str=True)
    declared = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*declared, *_options()])  # type: ignore[attr-defined]
    return command


def _options() -> Iterable[inspect.Parameter]:
    panel = ""
    for setting in fields(Config):
        panel = PANELS.get(setting.name, panel)
        group = GROUPS.get(str(setting.type))
        for part in (setting,) if group is None else fields(group):
            yield _option(part, part.name if group is None else f"{setting.name}.{part.name}", panel)


def _option(setting: Field[Any], path: str, panel: str) -> inspect.Parameter:
    """Return the option of a setting as a parameter of a command."""
    kind = next(kind for kind in METAVARS if kind in str(setting.type))
    name = f"--{path.replace('_', '-')}"
    choices = setting.metadata["choices"]
    option = typer.Option(
        f"{name}/--no-{path.replace('_', '-')}" if kind == "bool" else name,
        help=setting.metadata["help"],
        metavar="|".join(choices) if choices else METAVARS[kind],
        rich_help_panel=panel,
        show_default=False,
    )
    is_list = str(setting.type).startswith("tuple")
    plain: Any = bool if kind == "bool" else list[str] if is_list else str
    annotation = Annotated[plain | None, option]
    return inspect.Parameter(
        path.replace(".", "__"), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def changed_settings(
    base: Mapping[str, Any],
    file: Path | None,
    options: Mapping[str, Any],
    arguments: Sequence[str] = (),
    assignments: Sequence[str] = (),
    option_names: Iterable[str] = (),
) -> dict[str, Any]:
    """Return settings changed by a file, options, dotted arguments and `--set`, in this order.

    Args:
        base: the settings before the changes.
        file: a settings file.
        options: the options of `with_settings`, None for those that were not given.
        arguments: the rest of the command line, such as `--head.m=4`.
        assignments: the values `KEY=VALUE` of `--set`.
        option_names: all options of the command, to suggest one in place of a misspelt argument.

    Example:
        >>> base = {"head": {"name": "arcface", "m": 0.5}, "epochs": None}
        >>> changed_settings(base, None, {"head": "a_softmax", "epochs": "3"}, ["--head.m=4"])
        {'head': {'name': 'a_softmax', 'm': 4}, 'epochs': 3}
    """
    settings = dict(base)
    if file is not None:  # the settings of a run are complete, so they are not merged with others
        settings = {**base, **read_settings(file)} if is_config_of_run(file) else merge(base, read_settings(file))
    given = {key.replace("__", "."): value for key, value in options.items() if value not in (None, [], ())}
    changes = [(path, _option_value(value)) for path, value in given.items()]
    later = [*_dotted(arguments, option_names), *map(assignment, assignments)]
    # Names of components (paths without a dot) come first, because a new name drops the options of the old component.
    for path, value in [*changes, *sorted(later, key=lambda change: "." in change[0])]:
        settings = set_path(settings, path, value)
    return settings


def _option_value(value: Any) -> Any:
    """Return the value of an option. A list may be given in one option, separated by commas, or in several.

    >>> _option_value("1e-3"), _option_value(["mirror,blur", "shift"])
    (0.001, ['mirror', 'blur', 'shift'])
    """
    if not isinstance(value, list):
        return parse_value(value) if isinstance(value, str) else value
    items: list[Any] = []
    for text in value:
        parsed = parse_value(text)
        items += parsed.split(",") if isinstance(parsed, str) else parsed if isinstance(parsed, list) else [parsed]
    return items


def assignment(text: str) -> Change:
    """Return the path and value of `KEY=VALUE`."""
    key, equals, value = text.partition("=")
    require(bool(equals and key), "--set", "KEY=VALUE", text)
    return _setting_path(key), parse_value(value)


def _setting_path(text: str) -> str:
    """Return a dotted path with the names of settings and options spelt with underscores, as in files.

    Keys that are not names of the library, such as those of classes, are not changed.

    >>> _setting_path("data.held-out"), _setting_path("augment.rand-augment.m"), _setting_path("data.keep.class-3")
    ('data.held_out', 'augment.rand_augment.m', 'data.keep.class-3')
    """
    names = text.split(".")
    depth = 2 if names[0] in FREE_KEYS else len(names)
    return ".".join([name.replace("-", "_") for name in names[:depth]] + names[depth:])


def _dotted(arguments: Sequence[str], option_names: Iterable[str]) -> Iterable[Change]:
    """Yield the paths and values of `--a.b=value` and `--a.b value`; `--a.b` without a value means true.

    >>> list(_dotted(["--head.m=4", "--model.widths", "[8, 8]", "--head.sharded"], []))
    [('head.m', 4), ('model.widths', [8, 8]), ('head.sharded', True)]
    >>> list(_dotted(["--epoch", "3"], ["--epochs"]))
    Traceback (most recent call last):
    ValueError: --epoch is not an option; did you mean --epochs?
    """
    settings = [setting.name for setting in fields(Config)]
    remaining = list(arguments)
    while remaining:
        key, equals, value = remaining.pop(0).partition("=")
        path = _setting_path(key.removeprefix("--"))
        first, dot, rest = path.partition(".")
        if not (key.startswith("--") and dot and first in settings):
            raise ValueError(f"{key[:80]} is not an option{_suggestion(path, rest, settings, option_names)}")
        if not equals:
            value = remaining.pop(0) if remaining and not remaining[0].startswith("--") else "true"
        yield path, parse_value(value)


def _suggestion(path: str, rest: str, settings: Sequence[str], option_names: Iterable[str]) -> str:
    """Return the end of the message about an unknown option; `rest` is its path after the first dot."""
    if path in OTHER_NAMES:
        return f"; did you mean --{OTHER_NAMES[path]}?"
    # Options are compared without their dashes, which would make all options similar.
    names = [f"{name}.{rest}" for name in settings] if rest else [name.removeprefix("--") for name in option_names]
    return nearest_name(path, names).replace("mean ", "mean --")


def settings_json(settings: Mapping[str, Any], indent: int = 1) -> str:
    """Return settings as JSON: one line per setting that differs from its default, then the others side by side.

    >>> print(settings_json({"clip": None, "seed": 0, "epochs": 3}))
    {
     "epochs": 3,
     "clip": null, "seed": 0
    }
    """
    defaults = Config().settings()
    unchanged = {key: value for key, value in settings.items() if key in defaults and value == defaults[key]}
    changed = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in settings.items() if key not in unchanged]
    return json_block([*changed, *fill_lines(unchanged)], indent)


def json_block(lines: Sequence[str], indent: int) -> str:
    """Return a JSON object of several lines; each of `lines` has one or more of its items."""
    margin = "\n" + " " * indent
    return f"{{{margin}{f',{margin}'.join(lines)}{margin[:-1]}}}" if lines else "{}"


def fill_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the items of a JSON object as lines, each with as many items as fit."""
    lines: list[str] = []
    for item in (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()):
        if lines and len(lines[-1]) + len(item) < WIDTH:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines
