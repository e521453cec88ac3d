"""The layouts of the compressed-tensors package: codes under the weight's own shape, a scale each or for every tile.

Plain transformers with that package, and vLLM, open them. Only weights of `Linear` modules can be codes; the config
says which modules are not, and which have another format than the others. More in `lpconv.checkpoint.compressed`. With
the settings of other writers such weights are read as a layout of theirs.
"""

from __future__ import annotations  # tensors are named below and not imported

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from lpconv.checkpoint.compressed import COMPRESSED_TENSORS, preset_of, quantization_config
from lpconv.formats.grains import Grain, grain_of
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import Component, Converted, Headers, Settings
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import one_by_one
from lpconv.forms.form import Form
from lpconv.forms.scaled import SCALE_SUFFIX, Scaled
from lpconv.forms.tiles import FACTOR_SUFFIX, Tiles

__all__ = ["Compressed", "CompressedTiles"]

_E4M3FN = FORMATS["e4m3fn"]
_SCALE_DTYPES = {"F32", "F16", "BF16"}
_WEIGHT, _PACKED_SUFFIX, _SIZE_SUFFIX = ".weight", "_packed", "_shape"


@dataclass(frozen=True, kw_only=True)
class _Layout(Scaled):
    """What the layouts ask of a form, whatever has a scale."""

    quantised_by: ClassVar[str | None] = COMPRESSED_TENSORS
    of_linears: ClassVar[bool] = True
    axis: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return preset_of(format.name, grain) is not None

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: Settings) -> str | None:
        preset = preset_of(format.name, settings.grain)
        if preset is None:
            words = settings.grain.words if settings.grain else "one scale"
            return f"the layout holds no {format.name} codes with {words}"
        group = (preset.inputs or {}).get("group_size", 1)
        if shape[-1] % group:
            return f"rows of {shape[-1]} numbers are not whole groups of {group}, in which readers quantise inputs"
        return super().refusal(shape, format, settings)

    @classmethod
    def configured(cls, made: Converted) -> dict[str, Any]:
        grain = grain_of(made.settings["granularity"])
        usual = preset_of(made.settings["format"], grain)
        found = {n: preset_of(f, grain) for n, f in made.formats.items()}
        assert usual is not None, "refused"
        others = {n.removesuffix(_WEIGHT): p for n, p in found.items() if p is not None and p != usual}
        return {"quantization_config": quantization_config(made.ignored, usual, others)}


@dataclass(frozen=True, kw_only=True)
class Compressed(_Layout):
    """`scale_dtype` is F32 in what lpconv writes; the package saves it again in the dtype of the model."""

    kind: ClassVar[str] = "compressed"

    scale_dtype: str = "F32"

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: Settings) -> Form:
        """Beside weights of another granularity a power of two: readers that keep scales in bf16 change others."""
        settings = settings if settings.grain is None else replace(settings, scale="pow2")
        return super().of(name, shape, format, settings)

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

    @property
    def grid(self) -> Grid | None:
        """The same as who reads layouts of others sees it; None for what is no matrix."""
        if len(self.shape) != 2 or 0 in self.shape:
            return None
        scale, codes = self.components
        return Grid(
            name=self.name,
            shape=self.shape,
            format=self.format,
            codes=one_by_one(codes),
            scales=one_by_one(scale, (self.shape[0], self.shape[1])),
        )


@dataclass(frozen=True, kw_only=True)
class CompressedTiles(_Layout, Tiles):
    """What `Preset` says, as lpconv writes it."""

    kind: ClassVar[str] = "compressed tiles"
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_SUFFIX, FACTOR_SUFFIX, _PACKED_SUFFIX, _SIZE_SUFFIX)
    whole: ClassVar[type[Scaled]] = Compressed
    has_short_scales: ClassVar[bool] = True

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        presets = headers.presets
        if presets is None:
            return None
        preset = presets.of(name.removesuffix(_PACKED_SUFFIX).removesuffix(_WEIGHT))
        suffix = _suffix(FORMATS[preset.number])
        if preset.grain is None or not name.endswith(suffix):
            return None
        found = cls._of_codes(name.removesuffix(suffix), name, preset.grain, preset.number, headers)
        return found if found and found.format.name == preset.number else None

    @property
    def codes(self) -> Component:
        return replace(super().codes, name=self.name + _suffix(self.format))

    @property
    def size(self) -> Component | None:
        is_integer = self.format.twos_complement
        return Component(name=self.name + _SIZE_SUFFIX, dtype="I64", shape=(2,)) if is_integer else None


def _suffix(format: Format) -> str:
    return "" if format.safetensors else _PACKED_SUFFIX
