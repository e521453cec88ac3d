"""Records of `lpconv probe`."""

import math
from dataclasses import dataclass

from lpconv.results.documents import Result, TensorRole


@dataclass(frozen=True, kw_only=True)
class FormatRates:
    """Effects of one format on a tensor at one loss scale, as shares of its finite, nonzero elements.

    `sqnr_db` is an estimate: inf if the format represents every value, NaN without a signal. `fits`: almost nothing is
    lost (`lpconv.probe.advice.what_if`). `fits_own_scale`: the same with the tensor's own power-of-two scale instead of
    the loss scale.
    """

    format: str
    log2_loss_scale: int
    underflow: float
    subnormal: float
    overflow: float
    sqnr_db: float
    fits: bool
    fits_own_scale: bool

    @property
    def lost(self) -> float:
        """Share of elements that underflow to zero or overflow."""
        return self.underflow + self.overflow


@dataclass(frozen=True, kw_only=True)
class ProbedRecord:
    """Exponents of one tensor role of one layer, and the effect of each format; `words` is its display name.

    `exponents` counts the elements by floor(log2|x|), lowest first. `plain` has the rates at loss scale 1, `scaled` at
    the scale recommended for each format, which differs for gradients only; both in the order of the report's formats.
    """

    layer: str
    role: TensorRole
    words: str
    is_gradient: bool
    num_elements: int
    num_zero: int
    num_nonfinite: int
    exponents: tuple[tuple[int, int], ...]
    plain: tuple[FormatRates, ...]
    scaled: tuple[FormatRates, ...]


@dataclass(frozen=True, kw_only=True)
class LossScaleRecord:
    """Recommended power-of-two loss scale for one format, with the worst gradient underflow at 1 and at that scale.

    `max_log2_scale` is the largest that leaves headroom above the largest recorded gradient.
    """

    format: str
    log2_scale: int
    max_log2_scale: int
    worst_underflow_before: float
    worst_underflow_after: float


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Norms of a gradient, and of the noise and the bias that rounding adds; `name` is a layer or a recipe.

    The noise comes from stochastic rounding; see `lpconv.probe.gradient_noise`.
    """

    name: str
    gradient: float
    noise: float
    bias: float

    @property
    def ratio(self) -> float:
        """Gradient over noise; Inf without noise."""
        return self.gradient / self.noise if self.noise else math.inf

    @property
    def is_drowned(self) -> bool:
        """Whether the gradient is below √3 of its noise, where rounded training stops helping (arXiv 2505.19115)."""
        return self.ratio < math.sqrt(3)


@dataclass(frozen=True, kw_only=True)
class RecipeNoise(GradientNoise):
    """Gradients of all parameters in a recipe, and those of each layer whose products it rounds."""

    layers: tuple[GradientNoise, ...]


@dataclass(frozen=True, kw_only=True)
class ProbeReport(Result):
    """Effects of several formats on the tensors of a probe. `findings` describe the worst tensors in each format.

    `at_risk` lists operands that fp8 represents badly even with scales per tensor, and a remedy last. `classes` are the
    display names of roles, in the order of a training step. `facts` are labelled settings. `overhead` is the time of
    recording divided by the other time.
    """

    kind: str = "probe-report"
    name: str
    facts: dict[str, str]
    formats: tuple[str, ...]
    classes: tuple[str, ...]
    steps_seen: int
    steps_recorded: int
    losses: tuple[float, ...]
    overhead: float
    tensors: tuple[ProbedRecord, ...]
    loss_scales: tuple[LossScaleRecord, ...]
    findings: dict[str, tuple[str, ...]]
    at_risk: tuple[str, ...] = ()
    noise: tuple[RecipeNoise, ...] = ()
    warnings: tuple[str, ...] = ()
