"""Loss scales that a run can have, by name or as a number. Imports no torch, so that `--help` is fast."""

import math

from lpconv.errors import UsageError

LOSS_SCALES = ("none", "dynamic", "logmax", "adaptive")


def check_loss_scale(scale: str, floor: str | None, *, precision: str, method: str, optimizer: str | None) -> None:
    """Raise UsageError, with the reason, for a loss scale that does not fit the rest of an arithmetic.

    `optimizer` names one that keeps bf16 weights, else None.
    """
    if scale not in LOSS_SCALES and not _is_scale(scale):
        raise UsageError(
            f"unknown loss scale `{scale}`", hint=f"use {', '.join(LOSS_SCALES)}, or a number such as 1024"
        )
    if method != "none" and scale != "none":
        raise UsageError(
            f"method `{method}` sets the scale of the backward pass itself, so a loss scale has no effect",
            hint="leave --loss-scale out, or use --method none",
        )
    if scale == "adaptive" and precision not in ("fp16", "bf16"):
        raise UsageError(
            f"adaptive loss scaling needs fp16 or bf16 gradients, not {precision}",
            hint="pass --precision fp16 or bf16",
        )
    if scale == "adaptive" and optimizer is not None:
        raise UsageError(
            f"adaptive loss scaling needs fp32 weights, but optimizer `{optimizer}` keeps bf16 weights",
            hint="pass --optimizer adamw",
        )
    if floor is not None and scale not in ("dynamic", "logmax"):
        raise UsageError(
            f"loss scale `{scale}` does not support a floor", hint="use --loss-scale-floor with dynamic or logmax"
        )


def _is_scale(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
