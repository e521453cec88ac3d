"""Records of `lpconv probe`."""

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
    warnings: tuple[str, ...] = ()
