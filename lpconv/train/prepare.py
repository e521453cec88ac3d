"""Prepare a model for training in an arithmetic: parameters, optimizer, and context of its passes."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lpconv.kernels.linear import E5M2_LINEAR, E5M2_STOCHASTIC, FP4_RECIPES, FP8_RECIPES, LinearRecipe, use_recipe
from lpconv.kernels.quantise import fake_quantise
from lpconv.loss_scale import LossScale, make_loss_scale
from lpconv.models.sharing import shard_parameters
from lpconv.optim import LowPrecisionAdamW, start_from_fp32
from lpconv.optim.exchange import fp32_values
from lpconv.scaled import AdamW, HyperParameters, ScaledTensor, adaptive_scaling, equivalent, native_groups, scaled
from lpconv.scaled.model import COMPUTE
from lpconv.scaled.places import heads
from lpconv.shards import is_sharded, local, placed_like
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import mesh
from lpconv.train.recipes import Arithmetic
from lpconv.train.recover import Recovery


class ScaledLowPrecisionAdamW(LowPrecisionAdamW):
    """`LowPrecisionAdamW` for a model of `lpconv.scaled` with bf16 data; same arguments and variants.

    `start` holds the fp32 values of the source model, so the low parts begin with the bits that bf16 drops. There is
    one parameter group per scale, so that schedulers work; lr·`group["scale"]` is the learning rate of the weights. The
    model may be sharded by FSDP2, with `start` whole or sharded alike.
    """

    def __init__(
        self, model: nn.Module, start: Mapping[str, Tensor], *, lr: float, weight_decay: float, **options: Any
    ) -> None:
        self.model = model
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._scales: dict[str, float] = {}
        data = {}
        for name, p in self._trained.items():
            own = local(p)
            assert isinstance(own, ScaledTensor)
            self._scales[name] = float(own.scale)
            data[name] = nn.Parameter(placed_like(p, own.data_part))  # shares its memory
        self.data = nn.ParameterDict({name.replace(".", "/"): x for name, x in data.items()})
        source = HyperParameters(lr=lr, weight_decay=weight_decay)
        groups = []
        for scale in sorted(set(self._scales.values())):
            mapped = equivalent("adamw", source, weight_scale=scale)
            params = [(name, data[name]) for name, own_scale in self._scales.items() if own_scale == scale]
            groups.append({"params": params, "lr": mapped.lr, "weight_decay": mapped.weight_decay, "scale": scale})
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **options)
        values = {name.replace(".", "/"): start[name] / scale for name, scale in self._scales.items()}
        start_from_fp32(self, self.data, values)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Like `LowPrecisionAdamW.step`; gradients of any scale are converted to bf16 values."""
        self._follow()
        for name, p in self._trained.items():
            grad = p.grad
            values = grad.dequantize(torch.bfloat16) if isinstance(grad, ScaledTensor) else grad
            self.data[name.replace(".", "/")].grad = None if values is None else values.to(torch.bfloat16)
        return super().step() if closure is None else super().step(closure)

    def _follow(self) -> None:
        """Share the parameters' memory again, because FSDP2 moves uneven parts at the first forward pass."""
        for name, p in self._trained.items():
            own = local(p)
            if is_sharded(p) and isinstance(own, ScaledTensor):
                local(self.data[name.replace(".", "/")]).data = own.data_part

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.model.zero_grad(set_to_none)

    def values(self) -> dict[str, Tensor]:
        """The trained parameters in fp32 by their names in the model, exactly as stored, on their devices."""
        self._follow()
        kept = fp32_values(self, self.data)
        return {name: kept[name.replace(".", "/")] * scale for name, scale in self._scales.items()}


_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp4": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A model, and how to step it. `make_optimizer` is called once the model is on its training device.

    `loss_scale` multiplies the loss; scaled methods and adaptive scaling have none. `autocast` is torch's autocast
    dtype for the forward pass, None for models that cast themselves or not at all.
    """

    model: Any
    make_optimizer: Callable[[], torch.optim.Optimizer]
    loss_scale: LossScale = field(default_factory=lambda: make_loss_scale("none"))
    autocast: torch.dtype | None = None

    def around_forward(self, device: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)

    def values(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The model's state with its trained parameters in the optimizer's full precision.

        For a sharded model, each rank has its rows. Tied names share one tensor.
        """
        state: dict[str, Tensor] = dict(self.model.state_dict(keep_vars=True))
        kept: Mapping[str, Tensor]
        if isinstance(optimizer, ScaledLowPrecisionAdamW):
            kept = optimizer.values()
        elif isinstance(optimizer, LowPrecisionAdamW):
            kept = fp32_values(optimizer, self.model)
        else:
            kept = {name: _full_precision(x, optimizer) for name, x in state.items()}
        values = {id(x): x.detach() for x in state.values()} | {id(state[n]): x.detach() for n, x in kept.items()}
        return {name: values[id(x)] for name, x in state.items()}


def prepare(
    model: Any, arithmetic: Arithmetic, options: FinetuneOptions, *, seed: int, recovery: Recovery | None = None
) -> TrainingSetup:
    """Change `model`, in fp32, in place for `arithmetic`."""
    settings: dict[str, Any] = {
        "lr": options.highest_lr,
        "betas": (0.9, options.beta2),
        "eps": 1e-8,
        "weight_decay": options.weight_decay,
    }
    autocast = _AUTOCAST.get(arithmetic.precision)
    if recovery is not None:
        make_on_codes = functools.partial(recovery.optimizer, model, **(settings | {"weight_decay": 0.0}))
        return TrainingSetup(model=model, make_optimizer=make_on_codes, autocast=autocast)
    if arithmetic.variant is not None:
        compiled = os.environ.get("LPCONV_COMPILE") != "never"  # as for the kernels
        settings |= {"variant": arithmetic.variant, "seed": seed, "diagnostics_every": options.update_interval,
                     "compiled": compiled}  # fmt: skip
    if arithmetic.is_scaled:
        return _scaled(model, arithmetic, settings, options)
    if arithmetic.loss_scale == "adaptive":
        adaptive_scaling(model, compute=arithmetic.precision)
        return TrainingSetup(model=model, make_optimizer=lambda: torch.optim.AdamW(model.parameters(), **settings))
    if arithmetic.precision in ("fp8", "fp4"):
        use_recipe(model, _linear_recipe(arithmetic), keep=heads(model))
    loss_scale = _loss_scale(arithmetic)
    if arithmetic.variant is not None:
        return TrainingSetup(model=model, make_optimizer=_kept_in_bf16(model, settings), loss_scale=loss_scale)
    make = _on_fp16_grid if arithmetic.optimizer == "fp16-weights" else torch.optim.AdamW
    return TrainingSetup(
        model=model,
        make_optimizer=lambda: make(model.parameters(), **settings),
        loss_scale=loss_scale,
        autocast=autocast,
    )


def shard(model: nn.Module, arithmetic: Arithmetic) -> None:
    """Shard every parameter by rows, in place; the rows of a block are gathered while it computes.

    Trainer's own `fsdp=True` silently trains unsharded on a CPU, and accelerate widens 16-bit parameters to fp32. So
    the model is sharded here, before Trainer sees it, and accelerate uses it as it is.

    The model is whole on all ranks, or was opened by rows (`lpconv.models.load`). Scaled parameters stored in fp32 are
    gathered and computed in the precision of the arithmetic; everything else is gathered as stored. Gradients are
    summed in fp32.
    """
    keeps_fp32 = arithmetic.is_scaled and arithmetic.variant is None
    carrier = COMPUTE[arithmetic.precision].carrier if keeps_fp32 else None
    policy = MixedPrecisionPolicy(param_dtype=carrier, reduce_dtype=torch.float32)
    shard_parameters(model, mesh(), policy)


def _linear_recipe(arithmetic: Arithmetic) -> LinearRecipe:
    if arithmetic.precision == "fp4":
        return FP4_RECIPES[arithmetic.operand_scale]
    if arithmetic.has_blocks:
        return FP8_RECIPES[arithmetic.operand_scale]
    return E5M2_LINEAR if arithmetic.operand_rounding == "nearest" else E5M2_STOCHASTIC


def _scaled(model: Any, arithmetic: Arithmetic, settings: dict[str, Any], options: FinetuneOptions) -> TrainingSetup:
    """Setup with scaled parameters, stored in fp32 or as the variant defines. Calibrated scales are static."""
    start: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    has_fp16_state = arithmetic.optimizer == "fp16-state"
    keeps_fp32 = options.is_sharded and arithmetic.variant is None  # other setups keep fp32 in the optimizer
    places = ("layernorm_grad", "weight_grad") if arithmetic.method == "scalify" and has_fp16_state else None
    scaled(
        model, method=arithmetic.method, compute=arithmetic.precision, rescale=places,
        critical=options.critical_patterns, operand_scale=_operand_scale_of(arithmetic, options),
        carrier=torch.float32 if keeps_fp32 else None,
    )  # fmt: skip
    if arithmetic.variant is not None:

        def make_in_parts() -> ScaledLowPrecisionAdamW:
            optimizer = ScaledLowPrecisionAdamW(model, start, **settings)
            start.clear()
            return optimizer

        return TrainingSetup(model=model, make_optimizer=make_in_parts)
    state_dtype = torch.float16 if has_fp16_state else torch.float32

    def make() -> AdamW:
        has_copy = arithmetic.precision != "fp32" and not keeps_fp32
        values = {p: start[n] for n, p in model.named_parameters()} if has_copy else {}
        start.clear()
        # For weights that were 16-bit from the start, updates below half a step reach the forward pass only on average.
        is_on_grid = all(torch.equal(x, x.to(p.dtype).to(x.dtype)) for p, x in values.items())
        rounding: Literal["nearest", "stochastic"] = "stochastic" if values and is_on_grid else "nearest"
        groups = model.parameters()
        if arithmetic.is_native:
            groups = native_groups(groups, options.highest_lr, rule=options.lr_rule or "u-mup")
        return AdamW(groups, **settings, state_dtype=state_dtype, start=values, rounding=rounding)

    return TrainingSetup(model=model, make_optimizer=make)


def _operand_scale_of(arithmetic: Arithmetic, options: FinetuneOptions) -> str:
    """The operand scale of the arithmetic. Calibrated scales imply static casts, unless another kind is named."""
    is_usual = arithmetic.operand_scale == Arithmetic.operand_scale
    return "static" if options.calibrate and is_usual else arithmetic.operand_scale


def _kept_in_bf16(model: Any, settings: dict[str, Any]) -> Callable[[], torch.optim.Optimizer]:
    """Round `model` to bf16; the returned function makes an optimizer with the rounding errors."""
    start: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)

    def make() -> torch.optim.Optimizer:
        optimizer = LowPrecisionAdamW(model.named_parameters(), **settings)
        start_from_fp32(optimizer, model, start)
        start.clear()
        return optimizer

    return make


def _on_fp16_grid(parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """AdamW whose weights are fp16 numbers, from the start and after each step, stored in fp32.

    So gradients can be divided by the loss scale without loss, as in the paper's update.
    """
    kept = list(parameters)

    @torch.no_grad()
    def round_weights(*_: Any) -> None:
        for p in kept:
            own = local(p)
            fake_quantise(own, "fp16", overflow="inf", out=own)

    round_weights()
    optimizer = torch.optim.AdamW(kept, **settings)
    optimizer.register_step_post_hook(round_weights)
    return optimizer


def _loss_scale(arithmetic: Arithmetic) -> LossScale:
    name = arithmetic.loss_scale
    if name in ("dynamic", "logmax"):
        return make_loss_scale(name, floor=arithmetic.loss_scale_floor)
    return make_loss_scale("none") if name == "none" else make_loss_scale("constant", scale=float(name))


def _full_precision(x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """A parameter or buffer in full precision: for a scaled one, the optimizer's copy if there is one."""
    own = local(x)
    if not isinstance(own, ScaledTensor):
        return x
    copy = optimizer.state.get(x, {}).get("master")
    return placed_like(x, own.dequantize()) if copy is None else copy * own.scale
