"""`hypersphere cite`: print BibTeX entries for the works behind the components of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypersphere.cli.references import REFERENCES

__all__ = ["OPTIONS", "SOURCES", "cite"]

THESIS, SPHEREFACE, HYPERSPHERICAL = "liu2020thesis", "liu2017sphereface", "liu2017hyperspherical"
DECOUPLED, ENERGY, COMPRESSIVE, ROTATION = (
    "liu2018decoupled",
    "liu2018energy",
    "lin2020regularizing",
    "liu2021orthogonal",
)
RESNET, POINTNET, GRAPHS = "he2016deep", "qi2017pointnet", ("sen2008collective", "yang2016revisiting")

# References by component of a job and by name. Textbook components and those of this library have none.
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {
        "digits": ("alpaydin1998cascading",),
        "mnist": ("lecun1998gradient",),
        "fashion_mnist": ("xiao2017fashion",),
        "cifar10": ("krizhevsky2009learning",),
        "cifar100": ("krizhevsky2009learning",),
        "cifar100_fifth": ("krizhevsky2009learning",),
        "modelnet10": ("wu2015shapenets",),
        "omniglot": ("lake2015human",),
        "lfw": ("huang2007labeled",),
        "image_folder": (),
        "cora": GRAPHS,
        "citeseer": GRAPHS,
        "pubmed": GRAPHS,
    },
    "model": {
        **{f"spherenet_cnn{depth}": (HYPERSPHERICAL,) for depth in (3, 9, 18, 45, 60, 69)},
        "decoupled_cnn9": (DECOUPLED,),
        "attack_cnn9": (DECOUPLED,),
        **{f"mhe_cnn{depth}": (ENERGY,) for depth in (6, 9, 15)},
        "wide_cnn9": (ROTATION,),
        "small_cnn3": (COMPRESSIVE,),
        "small_cnn9": (COMPRESSIVE,),
        "opt_cnn6": (ROTATION,),
        "opt_cnn9": (ROTATION,),
        "cnn10": (ROTATION,),
        "few_shot_cnn4": (ROTATION,),
        "mnist_cnn6": (SPHEREFACE, THESIS),
        "toy_cnn": (),
        "embedding_cnn": (),
        **dict.fromkeys(("resnet20", "resnet32", "resnet18", "resnet34"), (RESNET,)),
        "spherenet_resnet32": (RESNET, HYPERSPHERICAL),
        "mhe_resnet32": (RESNET, ENERGY),
        "wide_resnet32": (RESNET, THESIS),
        "wide_resnet18": (RESNET, THESIS),
        "modified_resnet18": (RESNET, DECOUPLED),
        **{f"sphereface{depth}": (SPHEREFACE,) for depth in (4, 10, 20, 36, 64)},
        "mlp": (),
        "pointnet": (POINTNET,),
        "pointnet_transforms": (POINTNET,),
        "pointnet2": ("qi2017pointnet2",),
        "gcn": ("kipf2017semi",),
    },
    "operator": {
        "none": (),
        "sphere_norm": (HYPERSPHERICAL,),
        "sphere": (HYPERSPHERICAL,),
        **dict.fromkeys(("ball", "tanh", "linear", "seg", "log", "mix", "inner_product"), (DECOUPLED,)),
    },
    "head": {
        "softmax": (),
        "modified_softmax": (SPHEREFACE,),
        "l_softmax": ("liu2016large",),
        "a_softmax": (SPHEREFACE,),
        "w_softmax": (HYPERSPHERICAL,),
        "ga_softmax": (HYPERSPHERICAL,),
        "s_softmax": (THESIS,),
        "am_softmax": ("wang2018additive", "wang2018cosface"),
        "arcface": ("deng2019arcface",),
        "combined_margin": ("deng2019arcface",),
        "adaface": ("kim2022adaface",),
        "sphereface_plus": (SPHEREFACE, ENERGY),
        "sphereface_r": ("liu2022revived",),
        "sphereface2": ("wen2022sphereface2",),
    },
    "regularizer": {
        "none": (),
        "mhe": (ENERGY,),
        "comhe": (COMPRESSIVE,),
        "orthonormal": ("brock2017neural",),
        "orthogonal": (THESIS,),
        "srip": ("bansal2018can",),
    },
    "rotation": {
        "none": (),
        **dict.fromkeys(("gram_schmidt", "householder", "lowdin", "cayley", "neumann", "free"), (ROTATION,)),
        **dict.fromkeys(("positive_definite", "triangular", "banded", "penalized", "stochastic"), (ROTATION,)),
        "exponential": (ROTATION, "lezcano2019cheap"),
        "descent": (ROTATION, "li2020efficient"),
    },
    "attack": {
        "fgsm": ("goodfellow2014explaining",),
        "bim": ("kurakin2016adversarial",),
        "deepfool": ("moosavi2016deepfool",),
    },
    "measure": {"angular Fisher score": (THESIS,), "angular visual hardness": ("chen2020angular",)},
}

# Options with a reference: by component and option, the value or the smallest number that uses the work, and the work.
OPTIONS: dict[tuple[str, str], dict[Any, str]] = {
    ("rotation", "refine"): {"mhe": ENERGY, "half_space_mhe": ENERGY, "comhe": COMPRESSIVE},
    ("rotation", "factors"): {2: "liu2024boft"},
    ("rotation", "bound"): {0: "qiu2023controlling"},
    ("head", "gradient"): {"detached": "liu2022revived"},
}


def cite(folder: Path | None, *, everything: bool) -> None:
    """Print the entries for a run, or all entries, each under a comment that lists the components that use it."""
    if (folder is None) != everything:
        raise ValueError("cite needs either the folder of a run or --all")
    if folder is None:
        uses = {key: _users(key) for key in REFERENCES}
    else:
        from hypersphere.training.job_run import Run

        uses = works_of(Run.open(folder).job.settings())
    for key, parts in uses.items():
        print(f"% {', '.join(parts)}\n{REFERENCES[key].bibtex(key)}\n")


def works_of(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the keys of the works that a job uses, each with its components; the thesis comes first.

    >>> works_of({"head": {"name": "a_softmax", "m": 3}, "rotation": {"name": "cayley", "refine": "mhe"}})
    {'liu2020thesis': ['the framework'], 'liu2017sphereface': ['head a_softmax'],
     'liu2021orthogonal': ['rotation cayley'], 'liu2018energy': ['rotation.refine mhe']}
    """
    uses: dict[str, list[str]] = {THESIS: ["the framework"]}
    for part, by_name in SOURCES.items():
        spec = settings.get(part) or {}
        for key in by_name.get(spec.get("name", ""), ()):
            uses.setdefault(key, []).append(f"{part} {spec['name']}")
        for option, value in spec.items():
            for least, key in OPTIONS.get((part, option), {}).items():
                counts = value == least if isinstance(least, str) else value is not None and value >= least
                if counts:
                    uses.setdefault(key, []).append(f"{part}.{option} {value}")
    return uses


def _users(key: str) -> list[str]:
    parts = [f"{part} {name}" for part, by_name in SOURCES.items() for name, keys in by_name.items() if key in keys]
    options = [f"{part}.{option}" for (part, option), keys in OPTIONS.items() if key in keys.values()]
    return ["the framework", *parts, *options] if key == THESIS else [*parts, *options]
