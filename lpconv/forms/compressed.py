"""The layout of the compressed-tensors package: e4m3fn codes under the weight's own shape, a scale each or per row.

Plain transformers with that package, and vLLM, open it. Only weights of `Linear` modules can be codes, and all in one
format; the config says which modules are not. More in `lpconv.checkpoint.compressed`.
"""

from __future__ import annotations  # tensors are named below and not imported

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from lpconv.checkpoint.compressed import COMPRESSED_TENSORS, quantization_config
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import Component, Headers, Settings
from lpconv.forms.rows import Rows
from lpconv.forms.scaled import SCALE_SUFFIX, Scaled

__all__ = ["Compressed", "CompressedRows"]

_E4M3FN = FORMATS["e4m3fn"]
_SCALE_DTYPES = {"F32", "F16", "BF16"}


@dataclass(frozen=True, kw_only=True)
class _Layout(Scaled):
    """What the layout asks of a form of either granularity; `has_row_scales` is what differs in its config."""

    quantised_by: ClassVar[str | None] = COMPRESSED_TENSORS
    holds_one_format: ClassVar[bool] = True
    axis: ClassVar[tuple[int, ...]] = ()
    has_row_scales: ClassVar[bool] = False

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: Settings) -> str | None:
        if format != _E4M3FN:
            return f"the layout holds {_E4M3FN.name} codes only"
        return super().refusal(shape, format, settings)

    @classmethod
    def configured(
        cls,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        formats: Mapping[str, str],
        ignored: Iterable[str] | None,
    ) -> dict[str, Any]:
        assert ignored is not None, "the layout names what is not quantised"
        return {"quantization_config": quantization_config(ignored, rows=cls.has_row_scales)}


@dataclass(frozen=True, kw_only=True)
class Compressed(_Layout):
    """`scale_dtype` is F32 in what lpconv writes; the package saves it again in the dtype of the model."""

    kind: ClassVar[str] = "compressed"

    scale_dtype: str = "F32"

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        codes, scale = headers.root[name], headers.root.get(name + SCALE_SUFFIX)
        if headers.quantised_by != cls.quantised_by or codes.dtype != _E4M3FN.safetensors or scale is None:
            return None
        form = cls(name=name, shape=codes.shape, format=_E4M3FN, scale_dtype=scale.dtype)
        return form if scale.dtype in _SCALE_DTYPES and all(map(headers.holds, form.components)) else None

    @property
    def components(self) -> tuple[Component, ...]:
        scale, codes = super().components
        return replace(scale, dtype=self.scale_dtype), codes


@dataclass(frozen=True, kw_only=True)
class CompressedRows(_Layout, Rows):
    """FP8_DYNAMIC, as lpconv writes it; with the settings of other writers it is read as a layout of theirs."""

    kind: ClassVar[str] = "compressed rows"
    has_row_scales: ClassVar[bool] = True

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        ignored = headers.quantization.get("ignore")
        is_ours = isinstance(ignored, list) and headers.quantization == quantization_config(ignored, rows=True)
        return super().recognise(name, headers) if is_ours and headers.root[name].dtype == "F8_E4M3" else None
