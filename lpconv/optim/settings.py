"""Options of an optimizer, with names resolved and numbers checked."""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lpconv.errors import UnsupportedError, UsageError
from lpconv.lookup import find
from lpconv.optim.rules import RULES, UpdateRule, largest_ratio
from lpconv.optim.storage import VARIANTS, Storage, Variant

_ARITHMETICS = dict.fromkeys(("fused", "paper"))
_NONFINITE = dict.fromkeys(("ignore", "skip", "raise"))

# v · decay rounds back to v if 1 - decay is under half the relative spacing of bf16, 2^-9 to 2^-8.
_LARGEST_BF16_DECAY = 0.998


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Options of an optimizer, resolved and checked by `make_settings`."""

    rule: UpdateRule
    variant: Variant
    arithmetic: str = "fused"
    nonfinite_gradients: str = "ignore"
    compiled: bool = True
    seed: int = 0
    diagnostics_every: int = 0
    fp8_residual: torch.dtype = torch.bfloat16

    @functools.cached_property
    def storages(self) -> dict[torch.dtype, tuple[Storage, ...]]:
        """Storages of a weight and its moments by the parameter's dtype; e4m3fn only if the variant supports it."""
        moments = self.variant.moments[: len(self.rule.moments)]
        known = {torch.bfloat16: (self.variant.weight, *moments), torch.float32: (Storage.FP32,) * (1 + len(moments))}
        pair = Storage.FP8_FP8 if self.fp8_residual == torch.float8_e4m3fn else Storage.FP8_BF16
        in_fp8 = {Storage.PAIR: pair, Storage.BF16: Storage.FP8, Storage.MASTER: Storage.FP8_MASTER}
        if self.rule.name == "adamw" and self.arithmetic != "paper" and self.variant.weight in in_fp8:
            known[torch.float8_e4m3fn] = (in_fp8[self.variant.weight], *moments)
        return known


def make_settings(
    *, rule: str, variant: str, state_dtype: torch.dtype = torch.bfloat16, **options: Any
) -> UpdateSettings:
    """Resolve and check options; `options` are fields of `UpdateSettings`.

    Raises UsageError, with a hint, for unknown names and unsupported paper arithmetic.
    """
    for name in options:  # torch.optim has others, such as `fused` and `foreach`: here the step is always fused
        find("option", name, {"state_dtype": None, **UpdateSettings.__dataclass_fields__})
    chosen = _with_state_dtype(find("variant", variant, VARIANTS), state_dtype)
    settings = UpdateSettings(rule=RULES[chosen.rule or rule], variant=chosen, **options)
    if settings.fp8_residual not in (torch.bfloat16, torch.float8_e4m3fn):
        raise UnsupportedError(
            f"{settings.fp8_residual} cannot be the residual of fp8 weights",
            hint="use torch.bfloat16 or torch.float8_e4m3fn",
        )
    find("arithmetic", settings.arithmetic, _ARITHMETICS)
    find("nonfinite_gradients", settings.nonfinite_gradients, _NONFINITE)
    if settings.arithmetic == "paper" and (rule != "adamw" or chosen not in (VARIANTS["light"], VARIANTS["plus"])):
        raise UsageError(
            f"the paper's arithmetic covers AdamW light and plus with bf16 moments, not {rule} {variant}",
            hint="use arithmetic='fused'",
        )
    return settings


def check_group(group: Mapping[str, Any], settings: UpdateSettings) -> None:
    """Raise UnsupportedError for dtypes and UsageError for numbers out of range; warn if a moment cannot decay."""
    for p in group["params"]:
        if p.dtype == torch.float8_e4m3fn and p.dtype not in settings.storages:
            raise UnsupportedError(
                f"{p.dtype} weights cannot be trained with {settings.rule.name}, {settings.variant.name}, "
                f"{settings.arithmetic} arithmetic",
                hint="use AdamW with arithmetic='fused' and variant light, plus, full, bf16 or fp32-master",
            )
        if p.dtype not in settings.storages:
            raise UnsupportedError(
                f"cannot train a parameter of {p.dtype}",
                hint="use bf16, fp32, or e4m3fn on unit scale (`use_fp8_weights`)",
            )
    scale = group.get("weight_scale", 1.0)
    if scale != 1 and settings.rule.name != "adamw":
        raise UnsupportedError(
            f"{settings.rule.name} does not support weight_scale", hint="use AdamW for scaled weights"
        )
    if not (scale > 0 and math.frexp(scale)[0] == 0.5):
        raise UsageError(
            f"weight_scale = {scale} is not a power of two", hint="use the scale that `use_fp8_weights` returned"
        )
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if not 0 <= float(group.get(name, 0.0)) < float("inf"):
            raise UsageError(f"{name} = {group[name]} is out of range", hint="it must be at least 0")
    betas = group.get("betas", ())
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas = {betas} are out of range", hint="each beta must be at least 0 and below 1")
    if settings.rule.name == "adamw-ratio" and not math.isfinite(largest_ratio(betas)):
        raise UsageError(
            f"betas = {betas} do not bound the first moment, so {settings.variant.name} has no scale for it",
            hint="use beta1 below the square root of beta2, or variant='light-int8'",
        )
    _warn_if_moment_cannot_decay(group, settings)


def _warn_if_moment_cannot_decay(group: Mapping[str, Any], settings: UpdateSettings) -> None:
    rule, variant = settings.rule, settings.variant
    for name, storage, decay in zip(rule.moments, variant.moments, rule.decays(group), strict=False):
        if storage is Storage.BF16 and decay > _LARGEST_BF16_DECAY:
            better = "plus" if name == "exp_avg_sq" else "full"
            warnings.warn(
                f"variant '{variant.name}' keeps `{name}` in bf16, which cannot decay by a factor of {decay}: the "
                f"product rounds back above {_LARGEST_BF16_DECAY}; use variant='{better}'",
                stacklevel=5,
            )


def _with_state_dtype(variant: Variant, state_dtype: torch.dtype) -> Variant:
    if state_dtype == torch.bfloat16:
        return variant
    if state_dtype == torch.float32:
        return replace(variant, first=Storage.FP32, second=Storage.FP32)
    raise UnsupportedError(
        f"optimizer state cannot be kept in {state_dtype}", hint="use torch.bfloat16 or torch.float32"
    )
