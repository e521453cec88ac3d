"""Optimizers for low-precision weights: Collage and the variants it is compared with, in one implementation."""

from lpconv.optim.collage import CollageAdamW, CollageLion, CollageSGD, LowPrecisionAdamW
from lpconv.optim.exchange import fp32_state_dict, start_from_checkpoint, start_from_fp32
from lpconv.optim.fp8_weights import Fp8WeightLinear, use_fp8_weights
from lpconv.optim.halp import HALP, LPSGD, LPSVRG

__all__ = [
    "HALP",
    "LPSGD",
    "LPSVRG",
    "CollageAdamW",
    "CollageLion",
    "CollageSGD",
    "Fp8WeightLinear",
    "LowPrecisionAdamW",
    "fp32_state_dict",
    "start_from_checkpoint",
    "start_from_fp32",
    "use_fp8_weights",
]
