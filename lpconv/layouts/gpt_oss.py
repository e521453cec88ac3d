"""gpt-oss: experts in MXFP4, `NAME_blocks` of 16 bytes for 32 numbers and `NAME_scales`, transposed.

The file has a row for each output, [experts, out, groups, 16]; the parameter is [experts, in, out]. Only the experts
are codes. Sources: openai/gpt-oss, `gpt_oss/torch/weights.py` and its config.json; transformers 5.24,
`integrations/mxfp4.py`, convert_moe_packed_tensors.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lpconv.formats.grains import Grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import Component, ConvertedFacts, FormSettings, Headers
from lpconv.forms.form import Side
from lpconv.forms.grid import Grid
from lpconv.forms.planes import Plane, PlaneNames
from lpconv.forms.tiles import Tiles
from lpconv.layouts.layout import Layout, Scheme
from lpconv.layouts.mlx import older_settings

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS, _SCALES, _MX_GROUP = "_blocks", "_scales", 32
_FAMILY = "gpt_oss"  # the `model_type` for which readers have this layout
# As in the checkpoints of OpenAI; readers take none of these for codes in any case.
_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@dataclass(frozen=True, kw_only=True)
class GptOssExperts(Tiles):
    """Tiles of the experts of a layer, in the order of the file: [experts, out, in]."""

    kind: ClassVar[str] = "gpt-oss"
    names: ClassVar[PlaneNames] = PlaneNames(packed=_BLOCKS, scale=_SCALES)
    suffixes: ClassVar[tuple[str, ...]] = names.suffixes
    quantised_by: ClassVar[str | None] = "mxfp4"
    of_linears: ClassVar[bool] = True
    of_stacks: ClassVar[bool] = True

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return format.name == "e2m1" and grain is not None and grain.name == "mx"

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        if not settings.is_stack or settings.family != _FAMILY:
            return "only the experts of gpt-oss are codes in this layout"
        return super().refusal(shape, format, settings)

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        settings = {"quant_method": cls.quantised_by, "modules_to_not_convert": _PLAIN}
        return {"quantization_config": settings, **older_settings(converted.config)}

    @functools.cached_property
    def codes(self) -> Component:
        shape = (*self.shape[:-1], self.cols // _MX_GROUP, _MX_GROUP // 2)
        return Component(name=self.name + _BLOCKS, dtype="U8", shape=shape)

    @functools.cached_property
    def scales(self) -> Component:
        shape = (*self.shape[:-1], self.cols // _MX_GROUP)
        return Component(name=self.name + _SCALES, dtype="U8", shape=shape)

    @functools.cached_property
    def grid(self) -> Grid:
        grid = super().grid
        scales = replace(self.scales, shape=self.grain.grid(*self.matrix))
        return replace(grid, scales=replace(grid.scales, component=scales))

    def tile_scales(self, side: Side, rows: slice = slice(None)) -> Tensor:
        name = self.scales.name
        return super().tile_scales({**side, name: side[name].flatten(0, -2)}, rows)


def _read(name: str, headers: Headers) -> Grid | None:
    """The experts whose codes are `name`, in the order of the parameter."""
    weight = name.removesuffix(_BLOCKS)
    codes, scales = headers.component(name), headers.component(weight + _SCALES)
    if weight == name or codes is None or scales is None or (codes.dtype, scales.dtype) != ("U8", "U8"):
        return None
    if len(codes.shape) != 4 or codes.shape[-1] != _MX_GROUP // 2 or codes.shape[:-1] != scales.shape:
        return None
    experts, rows, groups, _ = codes.shape
    bytes_of_rows = Component(name=codes.name, dtype="U8", shape=(experts, rows, groups * _MX_GROUP // 2))
    return Grid(
        name=weight,
        shape=(experts, groups * _MX_GROUP, rows),
        format=FORMATS["e2m1"],
        codes=Plane(component=bytes_of_rows, kind="e2m1"),
        scales=Plane(component=scales, kind="e8m0", block=(1, _MX_GROUP)),
        is_transposed=True,
    )


_OPENS = "transformers; mlx-lm; vLLM and SGLang (not tested)"
GPT_OSS = Layout(
    name="mxfp4",
    methods=("mxfp4",),
    read=_read,
    dequantizer="Mxfp4Config",
    form=GptOssExperts,
    schemes=(Scheme("GPT_OSS_MXFP4", "e2m1", "mx", 4.25, _OPENS, "gpt-oss, with experts as OpenAI publishes them"),),
    opening="This directory has the layout of gpt-oss: {codes}. transformers, vLLM and mlx-lm open it; lpconv is not "
    "needed:",
    tag="mxfp4",
)
