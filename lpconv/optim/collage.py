"""The optimizers one constructs: AdamW, SGD with momentum and Lion on weights kept as (hi, lo) pairs."""

import torch

from lpconv.optim.base import LowPrecisionOptimizer, ParamsLike
from lpconv.optim.settings import make_settings

__all__ = ["CollageAdamW", "CollageLion", "CollageSGD"]


class CollageAdamW(LowPrecisionOptimizer):
    """AdamW for bf16 weights without fp32 copies: what bf16 drops is kept in a second bf16 number.

    `lr`, `betas`, `eps`, `weight_decay` (decoupled) and `maximize` mean what they mean in torch.optim.AdamW, parameter
    groups, schedulers, closures and a tensor `lr` included.

    `variant`: "light" keeps weights as pairs (10 bytes per parameter with a bf16 gradient), "plus" the second moment
    too (12; needed for beta2 above 0.998), "full" also the first (14). For comparison: "bf16" (8), "stochastic" (8),
    "kahan" (10), "fp32-moments" (12), "fp32-master" (16). `state_dtype=torch.float32` keeps the moments in fp32.
    `arithmetic`: "fused" computes in fp32 and rounds once per number and step; "paper" rounds at every operation, as
    published (arXiv 2405.03637), for light and plus. The two are different optimizers: name the one you used.
    `nonfinite_gradients`: "ignore" (as torch), "skip" or "raise", see `step`. `compiled=False` runs the fused step
    eagerly, which needs no compiler and is several times slower. `diagnostics_every=k` fills `records` (see
    `optim.diagnostics`) at each k-th step. `seed` is for the "stochastic" variant.

    e4m3fn parameters (`optim.fp8_weights`) are kept with a low part of `fp8_residual`, bf16 or e4m3fn, where the
    variant has pairs. In a group with `weight_scale` σ the options are meant for σ times what the parameters hold.

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
        maximize: bool = False,
        variant: str = "plus",
        arithmetic: str = "fused",
        state_dtype: torch.dtype = torch.bfloat16,
        nonfinite_gradients: str = "ignore",
        compiled: bool = True,
        seed: int = 0,
        diagnostics_every: int = 0,
        fp8_residual: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults | {"weight_scale": 1.0},
            make_settings(
                rule="adamw",
                variant=variant,
                arithmetic=arithmetic,
                state_dtype=state_dtype,
                nonfinite_gradients=nonfinite_gradients,
                compiled=compiled,
                seed=seed,
                diagnostics_every=diagnostics_every,
                fp8_residual=fp8_residual,
            ),
        )


class CollageSGD(LowPrecisionOptimizer):
    """SGD with momentum, as torch.optim.SGD (coupled weight decay, dampening, Nesterov), on weights kept as pairs.

    Options as in `CollageAdamW`; "light" keeps the momentum buffer in bf16 and "full" as a pair. There is no second
    moment, so "plus" is "light".
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
        state_dtype: torch.dtype = torch.bfloat16,
        nonfinite_gradients: str = "ignore",
        compiled: bool = True,
        seed: int = 0,
        diagnostics_every: int = 0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults | {"nesterov": nesterov, "maximize": maximize},
            make_settings(
                rule="sgd",
                variant=variant,
                arithmetic="fused",
                state_dtype=state_dtype,
                nonfinite_gradients=nonfinite_gradients,
                compiled=compiled,
                seed=seed,
                diagnostics_every=diagnostics_every,
            ),
        )


class CollageLion(LowPrecisionOptimizer):
    """Lion (arXiv 2302.06675) with decoupled weight decay, on weights kept as pairs. Options as in `CollageSGD`."""

    def __init__(
        self,
        params: ParamsLike,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        variant: str = "light",
        state_dtype: torch.dtype = torch.bfloat16,
        nonfinite_gradients: str = "ignore",
        compiled: bool = True,
        seed: int = 0,
        diagnostics_every: int = 0,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
            make_settings(
                rule="lion",
                variant=variant,
                arithmetic="fused",
                state_dtype=state_dtype,
                nonfinite_gradients=nonfinite_gradients,
                compiled=compiled,
                seed=seed,
                diagnostics_every=diagnostics_every,
            ),
        )
