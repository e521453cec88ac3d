"""Tensors that are `data · scale`: the rules that propagate scales, and the methods that are policies over them."""

from lpconv.scaled.adaptive import AdaptiveOptions, adaptive_factor, adaptive_scaling, loss_scales
from lpconv.scaled.calibrate import EdgeFactors, apply_factors, calibrate
from lpconv.scaled.disk import from_disk, read_factors, to_disk, write_factors
from lpconv.scaled.guard import StepGuard, gradients_are_finite
from lpconv.scaled.memory import saved_bytes
from lpconv.scaled.model import fallbacks, scaled, scaling_of, unscaled_state_dict
from lpconv.scaled.native import native, native_groups
from lpconv.scaled.optimizer import AdamW, HyperParameters, equivalent
from lpconv.scaled.rescale import dynamic_rescale, dynamic_rescale_grad
from lpconv.scaled.tensor import ScaledTensor, scaled_tensor

__all__ = [
    "AdamW",
    "AdaptiveOptions",
    "EdgeFactors",
    "HyperParameters",
    "ScaledTensor",
    "StepGuard",
    "adaptive_factor",
    "adaptive_scaling",
    "apply_factors",
    "calibrate",
    "dynamic_rescale",
    "dynamic_rescale_grad",
    "equivalent",
    "fallbacks",
    "from_disk",
    "gradients_are_finite",
    "loss_scales",
    "native",
    "native_groups",
    "read_factors",
    "saved_bytes",
    "scaled",
    "scaled_tensor",
    "scaling_of",
    "to_disk",
    "unscaled_state_dict",
    "write_factors",
]
