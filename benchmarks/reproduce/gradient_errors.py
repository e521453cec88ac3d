"""How much of a loss's gradients arrives at the parameters, in some arithmetic and at some size of the loss."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.common import markdown
from benchmarks.reproduce.miniature import Size, draw, start_model
from lpconv.kernels.matmul import HalfProducts
from lpconv.scaled import ScaledTensor

# Softmax cancels these biases in exact arithmetic, so their true gradient is zero.
_CANCELLED = ("key.bias", "k_proj.bias")


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """Median relative error over parameters, for a loss times 2^power."""

    model: str
    arithmetic: str
    power: int
    median_error: float


def gradients(model: nn.Module, factor: float = 1.0) -> dict[str, Tensor]:
    """Gradients as plain fp64 tensors, divided by `factor`, without those that are zero in exact arithmetic."""
    return {
        name: (p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad).double() / factor
        for name, p in model.named_parameters()
        if p.grad is not None and not name.endswith(_CANCELLED)
    }


def relative_errors(gradients_lp: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[float]:
    """|g - g_ref| / |g_ref| for every parameter; 1 means that the gradient was lost."""
    return [float((gradients_lp[name] - g).norm() / g.norm()) for name, g in reference.items()]


def gradient_errors(
    kind: str, size: Size, arithmetics: Mapping[str, Callable[[nn.Module], nn.Module]], powers: Sequence[int]
) -> list[GradientError]:
    """Errors against fp64 of every arithmetic, for a loss times each 2^power."""
    batch = draw(kind, size)
    exact = start_model(kind, size, 0).double()
    exact(**batch).loss.backward()
    reference = gradients(exact)
    errors = []
    for arithmetic, prepare in arithmetics.items():
        model = prepare(start_model(kind, size, 0))
        for power in powers:
            model.zero_grad()
            with HalfProducts():
                (model(**batch).loss.float() * 2.0**power).backward()
            error = statistics.median(relative_errors(gradients(model, 2.0**power), reference))
            errors.append(GradientError(model=kind, arithmetic=arithmetic, power=power, median_error=error))
    return errors


def error_table(title: str, heading: str, errors: Sequence[GradientError], powers: Collection[int]) -> str:
    """One row per model and arithmetic, one column per power."""
    rows = []
    for model, arithmetic in dict.fromkeys((g.model, g.arithmetic) for g in errors):
        by_power = {g.power: g.median_error for g in errors if (g.model, g.arithmetic) == (model, arithmetic)}
        rows.append((model, arithmetic, *(f"{by_power[p]:.2g}" for p in powers)))
    return f"{title}\n\n{markdown(('model', heading, *(f'2^{p}' for p in powers)), rows)}"
