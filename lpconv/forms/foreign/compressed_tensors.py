"""The layouts of the compressed-tensors package, as llm-compressor and others publish them; vLLM's native format.

`MODULE.weight` are codes stored one by one (float-quantized, int-quantized, mxfp8-quantized), with `weight_scale`.
Codes of fewer bits are `weight_packed`: bytes of two e2m1 (nvfp4- and mxfp4-pack-quantized) or words of integers
(pack-quantized, with `weight_shape`). NVFP4's `weight_global_scale` divides. Sources: vllm-project/compressed-tensors
0.20, `compressors/*/base.py` and `pack_quantized/helpers.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import INTEGERS, Plane, one_by_one
from lpconv.storage.compressed import COMPRESSED_TENSORS

METHODS = (COMPRESSED_TENSORS,)
_CODES = {"F8_E4M3": "e4m3fn", "I8": "int8"}
_PACKED = "_packed"


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    if name.endswith(_PACKED):
        return _packed(name, headers)
    return _one_by_one(name, headers)


def _one_by_one(name: str, headers: Headers) -> Grid | None:
    codes, scale = headers.component(name), headers.component(name + "_scale")
    fmt = _CODES.get(codes.dtype) if codes is not None else None
    if codes is None or scale is None or fmt is None or len(codes.shape) < 2:
        return None
    settings = weight_settings(headers.quantization)
    hints = [tuple(w["block_structure"]) for w in settings if _is_block(w.get("block_structure"))]
    block = block_of(codes.shape, one_by_one(scale).size, hints[0] if hints else (128, 128))
    zeros = headers.component(name + "_zero_point")
    if block is None:
        return None
    return Grid(
        name=name,
        shape=codes.shape,
        format=FORMATS[fmt],
        codes=one_by_one(codes),
        scales=one_by_one(scale, block),
        zeros=None if zeros is None else one_by_one(zeros, block),
    )


def _packed(name: str, headers: Headers) -> Grid | None:
    weight = name.removesuffix(_PACKED)
    codes, scale = headers.component(name), headers.component(weight + "_scale")
    if codes is None or scale is None or len(codes.shape) < 2:
        return None
    return _fp4(weight, codes, scale, headers) if codes.dtype == "U8" else _integers(weight, codes, scale, headers)


def _fp4(name: str, codes: Component, scale: Component, headers: Headers) -> Grid | None:
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    block = block_of(shape, one_by_one(scale).size)
    factor = headers.component(name + "_global_scale")
    if block is None or (scale.dtype == "F8_E4M3") != (factor is not None):
        return None
    return Grid(
        name=name,
        shape=shape,
        format=FORMATS["e2m1"],
        codes=Plane(component=codes, kind="e2m1"),
        scales=one_by_one(scale, block),
        factor=factor,
        divides=True,
    )


def _integers(name: str, codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """Integers of a width that the config names and the sizes allow; `weight_shape` must agree once it is read."""
    rows, words = codes.shape[-2:]
    for bits, group in _integer_schemes(headers):
        cols = one_by_one(scale).size[1] * group if group else words * 32 // bits
        scales = one_by_one(scale, (1, group or cols))
        zeros, offset = headers.component(name + "_zero_point"), -(2 ** (bits - 1))
        grid = Grid(
            name=name,
            shape=(*codes.shape[:-2], rows, cols),
            format=FORMATS["int4" if bits <= 4 else "int8"],
            codes=Plane(component=codes, kind=INTEGERS[bits], plus=offset),
            scales=scales,
            zeros=None if zeros is None else _zeros(zeros, scales.block, INTEGERS[bits], offset),
            order=headers.component(name + "_g_idx"),
            size=headers.component(name + "_shape"),
        )
        if grid.agrees:
            return grid
    return None


def _zeros(component: Component, block: tuple[int, int], kind: str, offset: int) -> Plane:
    """Zero points, which are packed along the rows of the weight, with the same offset as codes."""
    if component.dtype != "I32":
        return one_by_one(component, block)
    return Plane(component=component, kind=kind, block=block, axis=0, plus=offset)


def _integer_schemes(headers: Headers) -> Iterator[tuple[int, int | None]]:
    for weights in weight_settings(headers.quantization):
        bits, group = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type", "int") == "int" and isinstance(bits, int) and bits in INTEGERS:
            yield bits, group if isinstance(group, int) and group > 0 else None


def weight_settings(settings: object) -> Iterator[dict[str, Any]]:
    """Yield the weight settings of the config's groups."""
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)
