"""Decoupled and sphere layers: convolutions and linear layers that respond by magnitude and angle.

Numbers of equations and sections refer to Weiyang Liu's thesis, *Deep Representation Learning on Hypersphere*.
"""

from hypersphere._deprecation import deprecated_names
from hypersphere.layers.convert import (
    ConversionPlan,
    conversion_plan,
    convert_,
    equivalent_weight,
    fold_operator_,
    revert_,
)
from hypersphere.layers.decoupled import (
    DEFAULT_OPTIONS,
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLayer,
    DecoupledLinear,
    OperatorOptions,
    shared_k,
)
from hypersphere.layers.norm import SphereNorm
from hypersphere.layers.presets import (
    PRESETS,
    ball_conv2d,
    linear_conv2d,
    log_conv2d,
    mix_conv2d,
    seg_conv2d,
    sphere_conv2d,
    tanh_conv2d,
)

__all__ = [
    "DEFAULT_OPTIONS",
    "PRESETS",
    "ConversionPlan",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLayer",
    "DecoupledLinear",
    "OperatorOptions",
    "SphereNorm",
    "ball_conv2d",
    "conversion_plan",
    "convert_",
    "equivalent_weight",
    "fold_operator_",
    "linear_conv2d",
    "log_conv2d",
    "mix_conv2d",
    "revert_",
    "seg_conv2d",
    "shared_k",
    "sphere_conv2d",
    "tanh_conv2d",
]

__getattr__ = deprecated_names(
    __name__,
    {"plain_weight": "hypersphere.layers:equivalent_weight", "ConvOptions": "hypersphere.layers:OperatorOptions"},
)
