"""Inputs and results of forms: settings, headers, components, blocks and their measurements. No torch here."""

from __future__ import annotations  # tensors are named below and not imported

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from lpconv.formats.grains import Grain
from lpconv.storage.header import DTYPE_BITS, TensorInfo, quantization_method
from lpconv.summed import Summed, joined

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ELEMENTS = 2**19
CHECKED_ELEMENTS = 2**15  # elements that are compared with the slow reference at once


@dataclass(frozen=True, kw_only=True)
class FormSettings:
    """Settings of a conversion that apply to all tensors.

    `scale` is ``pow2``, ``exact`` or ``search``, `grain` the granularity of scales (None: the tensor), `residual` a key
    of `RESIDUALS`. Points have a budget of `budget_bits` per element and at most `points_max` per row. `has_feedback`
    means that codes of matrices are chosen by error feedback. `inputs`
    is how readers round inputs, None as usual (`layouts/compressed_config.py`), `kv_cache` means that the file has
    scales of keys and values, `is_expert` that the weight belongs to one of several experts, `is_stack` that it
    contains several, and `is_table` that it is an embedding. `family` is the model's `model_type`, for experts.
    """

    scale: str = "pow2"
    grain: Grain | None = None
    residual: str = "bf16"
    budget_bits: float = math.inf
    points_max: int = 1
    has_feedback: bool = False
    inputs: str | None = None
    kv_cache: bool = False
    is_expert: bool = False
    is_stack: bool = False
    is_table: bool = False
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class ConvertedFacts:
    """Facts about a converted checkpoint for its config.

    `config` is the source's, `settings` are method, format, scale and granularity of the conversion, `formats` the
    formats of converted tensors by name, and `ignored` the modules that are not converted, for third-party layouts.
    `experts` are the weights of single experts, and `named` the converted modules that readers do not find by the class
    Linear: heads and embeddings. `inputs` and `kv_cache` are as in `FormSettings`.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    formats: Mapping[str, str]
    ignored: Sequence[str]
    experts: Iterable[str] = ()
    named: Sequence[str] = ()
    inputs: str | None = None
    kv_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class Component:
    """One stored tensor, in the root checkpoint or in the residual files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    in_residual: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class Headers:
    """The headers and the quantisation settings of a checkpoint.

    `residual` is the form of the residuals in `low`; `quantised_by` is the config's `quant_method`, or None. `format`
    is the format of all codes except those of `exceptions`; it matters for byte codes only, since other dtypes are
    formats. `quantization` holds all quantisation settings of the config, for third-party layouts.
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
        """The headers of the files, with the settings of a config."""
        quantization = config.get("quantization_config")
        settings = quantization if isinstance(quantization, dict) else {}
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

    def component(self, name: str) -> Component | None:
        """The root component called `name`, or None."""
        info = self.root.get(name)
        return None if info is None else Component(name=name, dtype=info.dtype, shape=info.shape)

    def holds(self, component: Component) -> bool:
        """Whether a component exists, with its dtype and shape."""
        info = (self.low if component.in_residual else self.root).get(component.name)
        return info is not None and (info.dtype, info.shape) == (component.dtype, component.shape)


@dataclass(frozen=True, kw_only=True)
class BlockStats(Summed):
    """Σx² and max |x| over the finite elements of a block, and the counts of NaN and Inf."""

    num_elements: int = 0
    sum_squares: float = 0.0
    absmax: float = joined(max, 0.0)
    num_nan: int = 0
    num_inf: int = 0

    @property
    def rms(self) -> float:
        """sqrt(E[x²]) over the finite elements, 0 if there are none."""
        count = self.num_elements - self.num_nan - self.num_inf
        return math.sqrt(self.sum_squares / count) if count else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return not (self.num_nan or self.num_inf)


@dataclass(frozen=True, kw_only=True)
class BlockError(Summed):
    """Σ(x - x̂)², max |x - x̂| / |x|, and how many finite elements became infinite, or non-zero ones zero."""

    sum_squares: float = 0.0
    max_relative: float = joined(max, 0.0)
    num_saturated: int = 0
    num_flushed: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Results of the first pass over a block: statistics, and anything else that the form's side tensors depend on."""

    stats: BlockStats
    more: Any = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Results of the first pass over a tensor: statistics, and the side tensors to store, by name.

    `on_grid` means that these keep every number of the source, up to the dtype of its file; otherwise `grid` is the
    format on whose grid the numbers seem to be. With `is_guess` the side tensors are guessed, or follow block by block,
    and statistics are collected while blocks are encoded; `is_other` means that the final side tensors differ from
    those that the blocks were encoded with.
    """

    stats: BlockStats = field(default_factory=BlockStats)
    side: Mapping[str, Tensor] = field(default_factory=dict)
    on_grid: bool = False
    grid: str | None = None
    is_guess: bool = False
    is_other: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """An encoded block: the data for each file in the order of `Form.data`, statistics and error.

    The tensors may be views of the workspace. Statistics are None if the first pass collected them; both are None if
    the block was only copied.
    """

    data: tuple[Tensor, ...]
    stats: BlockStats | None = None
    error: BlockError | None = None


def block_ranges(num_elements: int, cols: int = 1, *, block_size: int = BLOCK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the blocks of a tensor, in order: whole rows of `cols` elements, at least one row."""
    size = max(block_size // cols, 1) * cols if num_elements else 1
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)


def checked_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """Yield parts of a block for comparison with the slow reference, whose fp64 temporaries then stay in the cache."""
    return block_ranges(num_elements, cols, block_size=CHECKED_ELEMENTS)
