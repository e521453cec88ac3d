"""The optimizer classes to construct: AdamW with any storage; Collage's AdamW, SGD and Lion on pairs of bf16."""

from typing import TypedDict, Unpack

import torch

from lpconv.lookup import find
from lpconv.optim.base import LowPrecisionOptimizer, ParamsLike
from lpconv.optim.settings import make_settings

_COLLAGE = dict.fromkeys(("light", "plus", "full"))


class StepOptions(TypedDict, total=False):
    """Options of every optimizer here, in addition to the numbers of its rule.

    `state_dtype=torch.float32` stores the moments in fp32 (default bf16). `nonfinite_gradients`: "ignore" (as in torch,
    the default), "skip" or "raise", see `step`. `compiled=False` runs the fused step eagerly, which needs no compiler
    and is several times slower. `diagnostics_every=k` fills `records` (see `optim.diagnostics`) at every k-th step; 0,
    the default, never does. `seed` (0) is for the "stochastic" variant.
    """

    state_dtype: torch.dtype
    nonfinite_gradients: str
    compiled: bool
    seed: int
    diagnostics_every: int


class AdamWOptions(StepOptions, total=False):
    """Options of AdamW.

    `arithmetic`: "fused" (the default) computes in fp32 and rounds once per number and step; "paper" rounds at every
    operation, as published (arXiv 2405.03637), for light and plus. These are two different optimizers, so report which
    one you used. `fp8_residual` is the dtype of the low part of e4m3fn parameters (`optim.fp8_weights`) in variants
    with pairs: bf16 (the default) or e4m3fn.
    """

    arithmetic: str
    fp8_residual: torch.dtype


class LowPrecisionAdamW(LowPrecisionOptimizer):
    """AdamW for bf16 weights in the variants that Collage is compared with; `variant` defines what is stored.

    With a bf16 gradient, bytes per parameter are: "bf16" 8, "stochastic" 8, "kahan" 10, "fp32-moments" 12,
    "fp32-master" 16, and with fewer bytes than Collage: "light-int8" 9, "int8-moment" 8, "eco" 8. For Collage's own
    three variants see `CollageAdamW`.

    `lr`, `betas`, `eps`, `weight_decay` (decoupled) and `maximize` are as in torch.optim.AdamW, including parameter
    groups, schedulers, closures and a tensor `lr`. The other options are `AdamWOptions`. In a group with `weight_scale`
    σ the options apply to σ times the stored parameters.

    To start from fp32 weights or a converted checkpoint, and to export fp32, see `optim.exchange`.
    """

    def __init__(
        self,
        params: ParamsLike,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        variant: str,
        maximize: bool = False,
        **options: Unpack[AdamWOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        settings = make_settings(rule="adamw", variant=variant, **options)
        super().__init__(params, defaults | {"weight_scale": 1.0}, settings)


class CollageAdamW(LowPrecisionAdamW):
    """AdamW for bf16 weights without an fp32 copy: a second bf16 number stores the bits that bf16 rounding drops.

    "light" stores weights as pairs (10 bytes per parameter with a bf16 gradient), "plus" also the second moment (12;
    needed for beta2 above 0.998), "full" also the first (14). Otherwise the same as `LowPrecisionAdamW`.
    """

    def __init__(
        self,
        params: ParamsLike,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        variant: str = "plus",
        maximize: bool = False,
        **options: Unpack[AdamWOptions],
    ) -> None:
        find("variant", variant, _COLLAGE)
        super().__init__(params, lr, betas, eps, weight_decay, variant=variant, maximize=maximize, **options)


class CollageSGD(LowPrecisionOptimizer):
    """SGD with momentum like `torch.optim.SGD` (coupled decay, dampening, Nesterov), for bf16 weights stored as pairs.

    "light" stores the momentum buffer in bf16 and "full" as a pair. There is no second moment, so "plus" equals
    "light". Other options are `StepOptions`.
    """

    def __init__(
        self,
        params: ParamsLike,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        variant: str = "light",
        **options: Unpack[StepOptions],
    ) -> None:
        find("variant", variant, _COLLAGE)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        settings = make_settings(rule="sgd", variant=variant, **options)
        super().__init__(params, defaults | {"nesterov": nesterov, "maximize": maximize}, settings)


class CollageLion(LowPrecisionOptimizer):
    """Lion (arXiv 2302.06675) with decoupled weight decay, for bf16 weights stored as pairs.

    Options as in `CollageSGD`.
    """

    def __init__(
        self,
        params: ParamsLike,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        variant: str = "light",
        **options: Unpack[StepOptions],
    ) -> None:
        find("variant", variant, _COLLAGE)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, make_settings(rule="lion", variant=variant, **options))
