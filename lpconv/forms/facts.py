"""What goes into a form and comes out: settings, headers, stored tensors, what was found in a block. No torch here."""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from lpconv.formats.grains import Grain
from lpconv.storage.compressed import CompressedPresets, presets_in, quantization_method
from lpconv.storage.header import DTYPE_BITS, TensorInfo
from lpconv.summed import Summed, joined

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a conversion chooses once for all tensors.

    `scale` is ``pow2``, ``exact`` or ``search``, `grain` what has a scale of its own (None: the tensor), `residual` a
    key of `RESIDUALS`. Points have a budget of `budget_bits` an element and at most `points_max` a row. `calibrated`
    says that inputs have scales in the file, too, `is_expert` that the weight is that of one of several experts.
    """

    scale: str = "pow2"
    grain: Grain | None = None
    residual: str = "bf16"
    budget_bits: float = math.inf
    points_max: int = 1
    calibrated: bool = False
    is_expert: bool = False


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What the config of a converted checkpoint may have to say.

    `config` is that of the source, `settings` are method, format, scale and granularity of the conversion, `formats`
    those of the converted tensors by name, and `ignored` the modules that are not converted, for layouts of others.
    `experts` are the weights of one expert each. `calibrated` is as in `Settings`.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    formats: Mapping[str, str]
    ignored: Sequence[str]
    experts: Iterable[str] = ()
    calibrated: bool = False


@dataclass(frozen=True, kw_only=True)
class Component:
    """One stored tensor, in the root checkpoint or beside it in the residual files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    in_residual: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What the headers and the config of a checkpoint say.

    `residual` is the form of the residuals in `low`; `quantised_by` the config's `quant_method`, None where there is
    none. `format` is that of all codes but those that `exceptions` name; only bytes need it, other dtypes are formats.
    `quantization` is all that the config says of it, for the layouts of others.
    """

    root: Mapping[str, TensorInfo]
    low: Mapping[str, TensorInfo] = field(default_factory=dict)
    residual: str = ""
    quantised_by: str | None = None
    format: str = ""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        root: Mapping[str, TensorInfo],
        *,
        low: Mapping[str, TensorInfo] | None = None,
        residual: str = "",
    ) -> Self:
        """The headers of the files, and the settings that a config has beside them."""
        found = config.get("quantization_config")
        settings = found if isinstance(found, dict) else {}
        exceptions = settings.get("exceptions")
        return cls(
            root=root,
            low=low or {},
            residual=residual,
            quantised_by=quantization_method(config),
            format=str(settings.get("format", "")),
            exceptions={n: str(f) for n, f in exceptions.items()} if isinstance(exceptions, dict) else {},
            quantization=settings,
        )

    @functools.cached_property
    def presets(self) -> CompressedPresets | None:
        """The layouts of compressed-tensors in which lpconv wrote the weights, None where it did not."""
        return presets_in(self.quantization)

    def component(self, name: str) -> Component | None:
        """What the root has under a name."""
        info = self.root.get(name)
        return None if info is None else Component(name=name, dtype=info.dtype, shape=info.shape)

    def holds(self, component: Component) -> bool:
        """Whether a component is there, with its dtype and shape."""
        info = (self.low if component.in_residual else self.root).get(component.name)
        return info is not None and (info.dtype, info.shape) == (component.dtype, component.shape)


@dataclass(frozen=True, kw_only=True)
class BlockStats(Summed):
    """Σx² and max |x| over the finite elements of a block, and the counts of what is not finite."""

    num_elements: int = 0
    sum_squares: float = 0.0
    absmax: float = joined(max, 0.0)
    num_nan: int = 0
    num_inf: int = 0

    @property
    def rms(self) -> float:
        """sqrt(E[x²]) over the finite elements, 0 where there are none."""
        count = self.num_elements - self.num_nan - self.num_inf
        return math.sqrt(self.sum_squares / count) if count else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return not (self.num_nan or self.num_inf)


@dataclass(frozen=True, kw_only=True)
class BlockError(Summed):
    """Σ(x - x̂)², max |x - x̂| / |x|, and how many finite elements became infinite or non-zero ones zero."""

    sum_squares: float = 0.0
    max_relative: float = joined(max, 0.0)
    num_saturated: int = 0
    num_flushed: int = 0


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What the first pass saw of a block: statistics, and whatever else the side tensors of its form depend on."""

    stats: BlockStats
    more: Any = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first pass over a tensor found: statistics, and the side tensors that are stored, by name.

    `on_grid` says that with these every number of the source is kept, as far as the dtype of its file has it; `grid` is
    the format on whose grid it seems to lie otherwise. With `is_guess` the side tensors are presumed, or follow block
    by block, and statistics are taken while blocks are encoded; `is_other` says of what all blocks then tell that it is
    not what they were encoded with.
    """

    stats: BlockStats = field(default_factory=BlockStats)
    side: Mapping[str, Tensor] = field(default_factory=dict)
    on_grid: bool = False
    grid: str | None = None
    is_guess: bool = False
    is_other: bool = False


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What became of a block: the data of each file in the order of `Form.data`, statistics and error.

    The tensors may be views of the workspace. Statistics are None where the first pass took them, both where the block
    was only copied.
    """

    data: tuple[Tensor, ...]
    stats: BlockStats | None = None
    error: BlockError | None = None
