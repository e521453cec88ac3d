"""Where third-party layouts store the parts of a weight: one function per layout that makes a `Grid` from headers.

Each takes a tensor's name and returns the weight whose codes have that name, or None. The caller checks dtypes and
sizes (`Grid.agrees`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import INTEGERS, Plane, one_by_one

SCALE_INV = "_scale_inv"
# An algorithm of ModelOpt that stores a part of each weight as the product of two thin matrices; not read by lpconv.
MODELOPT_SVD = "NVFP4_SVD"
_CODES = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2", "I8": "int8"}
_FLOATS = ("F32", "F16", "BF16")
_PACKED, _QWEIGHT, _BLOCKS = "_packed", ".qweight", "_blocks"
_BLOCK = (128, 128)  # fp8 blocks; the last ones may be smaller
_MX_GROUP = 32


def find_compressed_tensors(name: str, headers: Headers) -> Grid | None:
    """The layouts of the compressed-tensors package, as llm-compressor and others publish them; vLLM's native format.

    `MODULE.weight` are codes stored one by one (float-quantized, int-quantized, mxfp8-quantized), with `weight_scale`.
    Codes of fewer bits are `weight_packed`: bytes of two e2m1 (nvfp4- and mxfp4-pack-quantized) or words of integers
    (pack-quantized, with `weight_shape`). NVFP4's `weight_global_scale` divides. Sources: vllm-project/
    compressed-tensors 0.20, `compressors/*/base.py` and `pack_quantized/helpers.py`.
    """
    weight = name.removesuffix(_PACKED)
    codes, scale = headers.component(name), headers.component(weight + "_scale")
    if codes is None or scale is None or len(codes.shape) < 2:
        return None
    if weight == name:
        return _one_by_one(codes, scale, headers)
    return _fp4(weight, codes, scale, headers) if codes.dtype == "U8" else _integers(weight, codes, scale, headers)


def _one_by_one(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    hints = (_block_hint(w.get("block_structure")) for w in weight_settings(headers.quantization))
    block = block_of(codes.shape, one_by_one(scale).size, next(filter(None, hints), _BLOCK))
    zeros = headers.component(codes.name + "_zero_point")
    if block is None or codes.dtype not in ("F8_E4M3", "I8"):
        return None
    return Grid(
        name=codes.name,
        shape=codes.shape,
        format=FORMATS[_CODES[codes.dtype]],
        codes=one_by_one(codes),
        scales=one_by_one(scale, block),
        zeros=None if zeros is None else one_by_one(zeros, block),
    )


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
        divides=factor is not None,
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


def _block_hint(value: object) -> tuple[int, int] | None:
    """The block size that a config names, or None for anything but two positive sizes."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        return None
    return value[0], value[1]


def find_fp8(name: str, headers: Headers) -> Grid | None:
    """transformers' own fp8, introduced by DeepSeek-V3: e4m3fn blocks, and `NAME_scale_inv`, which multiplies.

    Scales are fp32 or bf16 numbers, or powers of two as e8m0 or bytes (``scale_fmt`` ue8m0; "mxfp8" has one for 32
    numbers of a row). Sources: transformers 5.23, `integrations/finegrained_fp8.py`; the config of
    deepseek-ai/DeepSeek-V3.
    """
    codes, scale = headers.component(name), headers.component(name + SCALE_INV)
    if codes is None or scale is None or codes.dtype not in ("F8_E4M3", "F8_E5M2") or len(codes.shape) < 2:
        return None
    block = block_of(
        codes.shape, one_by_one(scale).size, _block_hint(headers.quantization.get("weight_block_size")) or ()
    )
    if block is None:
        return None
    return Grid(
        name=name,
        shape=codes.shape,
        format=FORMATS[_CODES[codes.dtype]],
        codes=one_by_one(codes),
        scales=one_by_one(scale, block),
    )


def find_mxfp4(name: str, headers: Headers) -> Grid | None:
    """gpt-oss: experts in MXFP4, `NAME_blocks` of 16 bytes for 32 numbers and `NAME_scales`, transposed.

    The file has a row for each output, [experts, out, groups, 16]; the parameter is [experts, in, out]. Sources:
    openai/gpt-oss, `gpt_oss/torch/weights.py`; transformers 5.23, `integrations/mxfp4.py`, convert_moe_packed_tensors.
    """
    weight = name.removesuffix(_BLOCKS)
    codes, scales = headers.component(name), headers.component(weight + "_scales")
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


def find_modelopt(name: str, headers: Headers) -> Grid | None:
    """NVIDIA's ModelOpt: fp8, int8, int4, MX with a scale per tensor, row or block; NVFP4 with one more for the tensor.

    `MODULE.weight` are codes, 4-bit ones as two e2m1 per byte, the first in the lower half, with `weight_scale`: e4m3fn
    next to `weight_scale_2`, which multiplies (NVFP4), bytes (MX), otherwise fp32, of blocks [rows, 1, columns, 1].
    compressed-tensors' second scale divides instead: a file of one layout with the other's config is off by its square.

    4-bit integers (W4A16_AWQ, W4A8_AWQ) are bytes [out / 2, in] of two's complement: rows 2i and 2i + 1 are in the
    lower and upper half of row i, with fp32 scales [out, in / group]. W4A8_AWQ also has a `weight_scale_2`: readers
    divide `weight_scale` by it, round code · scale to e4m3fn, and multiply sums by it again. Values do not depend on
    it.

    `MODULE.pre_quant_scale` [in] (AWQ, also with other codes) is the factor by which readers multiply inputs, and by
    which the weight was divided. ModelOpt stores it for o_proj and down_proj; for modules that share inputs it folds
    the factor into the preceding norm, and their weights stay divided by it. Sources: NVIDIA/Model-Optimizer 0.47,
    `torch/quantization/qtensor/` and `export/quant_utils.py` (pack_int4_in_uint8, fuse_prequant_layernorm);
    NVIDIA/TensorRT-LLM, `_torch/modules/linear.py`, W4A16_AWQ_LinearMethod and W4A8_AWQ_LinearMethod.
    """
    codes, scale, module = headers.component(name), headers.component(name + "_scale"), name.removesuffix("weight")
    if codes is None or scale is None or len(codes.shape) < 2 or headers.component(module + "svdquant_lora_a"):
        return None
    layout = _modelopt_integers if codes.dtype == "U8" and scale.dtype in _FLOATS else _modelopt_others
    grid = layout(codes, _as_matrix(scale), headers)
    return None if grid is None else replace(grid, columns=headers.component(module + "pre_quant_scale"))


def _modelopt_integers(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """4-bit integers, with a scale per group of a row."""
    *lead, pairs, cols = codes.shape
    shape, of_products = (*lead, pairs * 2, cols), headers.component(codes.name + "_scale_2")
    block = block_of(shape, one_by_one(scale).size)
    if block is None or block[0] != 1 or (of_products is None and headers.quantization.get("quant_algo") == "W4A8_AWQ"):
        return None
    return Grid(
        name=codes.name,
        shape=shape,
        format=FORMATS["int4"],
        codes=Plane(component=codes, kind="int4", axis=0),
        scales=one_by_one(scale, block),
        cancelling=of_products,
    )


def _modelopt_others(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """8-bit floats and integers, and 4-bit floats."""
    fmt = {"U8": "e2m1", "F8_E4M3": "e4m3fn", "I8": "int8"}.get(codes.dtype)
    factor = headers.component(codes.name + "_scale_2")
    if fmt is None or (scale.dtype == "F8_E4M3") != (factor is not None):
        return None
    if fmt == "e2m1" and scale.dtype not in ("F8_E4M3", "U8"):
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if fmt == "e2m1" else codes.shape
    block = block_of(shape, one_by_one(scale).size, _BLOCK)
    if block is None:
        return None
    return Grid(
        name=codes.name,
        shape=shape,
        format=FORMATS[fmt],
        codes=Plane(component=codes, kind="e2m1") if fmt == "e2m1" else one_by_one(codes),
        scales=one_by_one(scale, block),
        factor=factor,
    )


def _as_matrix(scale: Component) -> Component:
    """Block scales as a matrix, without the axes of size one that are stored after each of the two."""
    shape = scale.shape
    is_blocks = len(shape) == 4 and shape[1] == shape[3] == 1
    return replace(scale, shape=(shape[0], shape[2])) if is_blocks else scale


def find_gptq(name: str, headers: Headers) -> Grid | None:
    """GPTQ: integers in groups, transposed, eight (4 bits) of one column per word.

    `MODULE.qweight` [in / 8, out], `scales` [groups, out], `qzeros` [groups, out / 8] and `g_idx` [in], the group of
    each input. Most files are of the first version, which stores a zero point minus one and wraps (15 is 0 for 4 bits);
    ``checkpoint_format`` "gptq_v2" stores the zero point itself. Sources: AutoGPTQ 0.7,
    `nn_modules/qlinear/qlinear_cuda.py`; ModelCloud/GPTQModel, `utils/model.py` (convert_gptq_v1_to_v2_format).
    """
    parts, bits = _transposed_words(name, headers), headers.quantization.get("bits")
    order = headers.component(f"{name.removesuffix(_QWEIGHT)}.g_idx")
    kind = INTEGERS.get(bits) if isinstance(bits, int) else None
    if parts is None or kind is None or order is None or len(order.shape) != 1:
        return None
    codes, scales, zeros = parts
    rows, cols = order.shape[0], codes.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    is_first_version = headers.quantization.get("checkpoint_format", "gptq") == "gptq"
    return Grid(
        name=f"{name.removesuffix(_QWEIGHT)}.weight",
        shape=(cols, rows),
        format=FORMATS["int4" if kind == "uint4" else "int8"],
        codes=Plane(component=codes, kind=kind, axis=0),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind=kind, block=block, plus=int(is_first_version), wraps=True),
        order=order,
        is_transposed=True,
    )


def find_awq(name: str, headers: Headers) -> Grid | None:
    """AWQ ("gemm"): 4-bit integers in groups, transposed, eight neighbours of a row per word, even ones first.

    `MODULE.qweight` [in, out / 8], `scales` [groups, out], `qzeros` [groups, out / 8]. Number k of a word is in nibble
    0, 4, 1, 5, 2, 6, 3, 7. Sources: AutoAWQ 0.2, `utils/packing_utils.py` and `modules/linear/gemm.py`.
    """
    parts, config = _transposed_words(name, headers), headers.quantization
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if parts is None or bits != 4 or version != "gemm":
        return None
    codes, scales, zeros = parts
    rows, cols = codes.shape[0], scales.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    return Grid(
        name=f"{name.removesuffix(_QWEIGHT)}.weight",
        shape=(cols, rows),
        format=FORMATS["int4"],
        codes=Plane(component=codes, kind="awq"),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind="awq", block=block),
        is_transposed=True,
    )


def _transposed_words(name: str, headers: Headers) -> tuple[Component, Component, Component] | None:
    """Codes, scales and zero points of a weight under the names of GPTQ and AWQ, or None."""
    module = name.removesuffix(_QWEIGHT)
    codes, scales, zeros = map(headers.component, (name, f"{module}.scales", f"{module}.qzeros"))
    if module == name or codes is None or scales is None or zeros is None:
        return None
    is_matrix = len(codes.shape) == 2 and len(scales.shape) == 2 and scales.shape[0] > 0
    return (codes, scales, zeros) if is_matrix else None
