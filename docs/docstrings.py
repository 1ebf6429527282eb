"""Griffe extension: prepare docstrings for the API pages and choose what is shown of a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1 *\S.*)*", re.M)
FORMULA = re.compile(r"^( *)\.\. math:: (.*(?:\n\1 +\S.*)*)", re.M)
SHARED = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {5,}\S.*)*)", re.M)
NOT_SHOWN = ("__post_init__", "__rich__", "extra_repr")

# What users reach for first, in this order, at the top of the page of each package. The rest follows as in `__all__`.
FIRST = {
    "data": (
        "digits",
        "image_folder",
        "LabelledImages",
        "draw_pairs",
        "read_pairs",
        "Pairs",
    ),
    "energy": ("MHE", "CoMHE", "inspect", "hyperspherical_energy", "minimize"),
    "evaluation": ("verify", "identify", "roc", "angular_fisher_score", "class_angles"),
    "gallery": ("Gallery", "Matches", "fingerprint_of"),
    "heads": (
        "arcface",
        "am_softmax",
        "a_softmax",
        "softmax",
        "AngularHead",
        "Annealing",
        "Ramp",
        "ShardedHead",
    ),
    "layers": (
        "convert_",
        "revert_",
        "DecoupledConv2d",
        "DecoupledLinear",
        "SphereNorm",
        "sphere_conv2d",
    ),
    "models": ("EmbeddingCNN", "Embedder", "PlainCNN", "ResNet", "SphereFaceNet"),
    "optim": ("param_groups", "project_weights_", "OGD"),
    "recipes": ("RECIPES", "execute", "find_recipe", "read_records"),
    "report": ("write_page", "Page"),
    "robustness": (
        "accuracy_under",
        "Classifier",
        "FGSM",
        "BIM",
        "DeepFool",
        "adversarial_loss",
    ),
    "rotation": (
        "rotate_",
        "fold_",
        "Stochastic",
        "Equivalence",
        "rotation_parameters",
        "orthogonality_error",
    ),
    "sphere": ("normalize", "norm", "cosine", "cosines", "angle", "polar"),
    "training": (
        "Config",
        "build_experiment",
        "Experiment",
        "Trainer",
        "Run",
        "fit",
        "embed",
        "predict",
    ),
    "_layer_selection": ("layers_of", "LayerSelection", "NeuronLayer", "SkippedLayer"),
}


def as_markdown(text: str) -> str:
    """Turn examples and formulas into Markdown, and split `first, second: …` into one line per argument."""
    text = SHARED.sub(
        lambda match: "\n".join(
            f"    {name}: {match[2]}" for name in match[1].split(", ")
        ),
        text,
    )
    if "```pycon" not in text:  # not converted yet
        text = EXAMPLE.sub(
            lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text
        )
    return FORMULA.sub(_formula, text)


def _formula(match: re.Match[str]) -> str:
    indent = match[1]
    lines = [f"{indent}{line.strip()}" for line in match[2].splitlines()]
    return "\n".join([f"{indent}$$", *lines, f"{indent}$$"])


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


def _resolve_constructor(owner: griffe.Class) -> None:
    """Show the signature of a constructor that is inherited from a private class or from a private module."""
    if "__init__" in owner.members:
        return
    for base in owner.mro():
        is_private = base.name.startswith("_") or base.module.name.startswith("_")
        if is_private and "__init__" in base.members:
            parameters = base.members["__init__"].parameters
            owner.members["__init__"] = griffe.Function(
                "__init__", parameters=parameters, parent=owner
            )
            return


def _add_options(
    owner: griffe.Class, options: dict[str, list[griffe.Parameter]]
) -> None:
    """Show the documented parameters that a constructor takes as `**options`.

    They are declared by the constructor of a base class, or by the `TypedDict` in the annotation of `options`.
    """
    constructor = owner.members.get("__init__")
    if not isinstance(constructor, griffe.Function) or not owner.docstring:
        return
    *shown, last = [*constructor.parameters] or [None]
    if last is None or last.kind is not griffe.ParameterKind.var_keyword:
        return
    documented = re.findall(r"^    (\w+): ", owner.docstring.value, re.M)
    inherited = [
        parameter
        for base in owner.mro()
        for parameter in getattr(base.members.get("__init__"), "parameters", ())
    ]
    typed = re.search(r"Unpack\[(\w+)\]", str(last.annotation))
    for parameter in [*inherited, *options.get(typed[1] if typed else "", [])]:
        names = {one.name for one in (*shown, last)}
        if parameter.name in documented and parameter.name not in names:
            shown.append(parameter)
    constructor.parameters = griffe.Parameters(*shown, last)


def _options_of(owner: griffe.Class) -> list[griffe.Parameter]:
    """Return the keys of a `TypedDict`, with defaults from a dictionary of that type in the same module."""
    calls = [
        ast.parse(str(member.value), mode="eval").body
        for member in owner.module.members.values()
        if isinstance(member, griffe.Attribute)
        and str(member.value).startswith(f"{owner.name}(")
    ]
    defaults = {
        one.arg: ast.unparse(one.value) for call in calls for one in call.keywords
    }
    return [
        griffe.Parameter(
            name,
            annotation=member.annotation,
            kind=griffe.ParameterKind.keyword_only,
            default=defaults.get(name, "..."),
        )
        for name, member in owner.members.items()
        if isinstance(member, griffe.Attribute)
    ]


def _show_settings(owner: griffe.Class) -> None:
    """Show the default and the help text of settings that are declared as `name = _setting(default, help, …)`."""
    constructor, lines = owner.members.get("__init__"), []
    for parameter in getattr(constructor, "parameters", ()):
        declaration = re.match(r"_(?:setting|component)\(", str(parameter.default))
        if declaration:
            call = ast.parse(str(parameter.default), mode="eval").body
            parameter.default = ast.unparse(call.args[0])
            lines.append(f"    {parameter.name}: {ast.literal_eval(call.args[1])}")
    if lines and owner.docstring:
        summary, _, rest = owner.docstring.value.partition("\n")
        settings = "\n".join(["", "", "Args:", *lines])
        owner.docstring.value = f"{summary}{settings}\n{rest}"


def _function_of(name: str, attribute: griffe.Attribute) -> griffe.Function | None:
    """Return the function that an attribute is a second name of, as in `build_experiment = build`."""
    function = attribute.module.members.get(str(attribute.value))
    if not isinstance(function, griffe.Function):
        return None
    return griffe.Function(
        name,
        parameters=function.parameters,
        returns=function.returns,
        docstring=function.docstring,
        parent=attribute.module,
    )


def _rewrite(owner: griffe.Module | griffe.Class) -> None:
    """Change the docstrings of all members of a module."""
    for member in owner.members.values():
        if member.is_alias:
            continue
        if member.docstring:
            member.docstring.value = as_markdown(member.docstring.value)
        if isinstance(member, griffe.Class):
            _rewrite(member)


class Docstrings(griffe.Extension):
    """Rewrite docstrings, hide members without one, and show the function `data.digits` instead of the module."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any
    ) -> None:
        """Choose what is shown, once the whole package is loaded."""
        options = {
            owner.name: _options_of(owner)
            for owner in _classes(pkg)
            if owner.name.endswith("Options")
        }
        for owner in _classes(pkg):
            _show_settings(owner)
            for name, member in list(owner.members.items()):
                if name != "__init__" and (name in NOT_SHOWN or not member.docstring):
                    del owner.members[name]
        loader.resolve_aliases()
        for owner in _classes(pkg):
            _resolve_constructor(owner)
            _add_options(owner, options)
        for room in pkg.modules.values():
            if room.is_alias:  # a menu, shown on the page of the functions
                continue
            if room.name in FIRST:  # its page has an introduction instead
                room.docstring = None
            if room.exports is not None:
                names = [str(name) for name in room.exports]
                first = [name for name in FIRST.get(room.name, ()) if name in names]
                room.exports = [*first, *(name for name in names if name not in first)]
            for name in map(str, room.exports or ()):
                member = room.members.get(name)
                if member is not None and member.is_alias and member.is_attribute:
                    function = _function_of(name, member.final_target)
                    if function is not None:
                        room.members[name] = griffe.Alias(name, function, parent=room)
                module = room.members.get(name)
                if module is not None and module.is_module and name in module.members:
                    # An export hides its module of the same name, so `on_object` has not seen what is in there.
                    _rewrite(module)
                    room.members[name] = griffe.Alias(
                        name, module.members[name], parent=room
                    )
