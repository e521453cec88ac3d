"""Checkpoints in third-party layouts, made from plain ones by the tools' own packages if these run on a CPU.

Other layouts are packed as their documentation says. Scales are those of rounding to nearest.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.layouts.compressed_config import input_scale_name
from lpconv.layouts.linears import fused_groups

__all__ = ["AWQ_ORDER", "MAKERS", "Maker", "make_foreign", "pack_words", "quantised"]

Tensors = dict[str, Tensor]
# The stored tensors of one weight, by its name; weights that readers fuse share the largest magnitude of all.
Maker = Callable[[str, Tensor, float], Tensors]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, utils/packing_utils.py: which number of eight lies in each nibble
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def scheme_of(preset: str, **changed: Any) -> Any:
    """A scheme of compressed-tensors."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    return scheme.model_copy(update={"weights": scheme.weights.model_copy(update=changed)})


def _scales(w: Tensor, block: tuple[int, int], limit: float) -> Tensor:
    """max |w| / limit of each block, 1 for blocks of zeros. Blocks at the edges may be smaller."""
    (rows, cols), (n, k) = block, w.shape
    padded = torch.nn.functional.pad(w, (0, -k % cols, 0, -n % rows))
    amax = padded.view(len(padded) // rows, rows, -1, cols).abs().amax((1, 3))
    return torch.where(amax == 0, 1.0, amax / limit)


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def _fp4(x: Tensor) -> Tensor:
    """Codes of the nearest e2m1, ties to the even code."""
    distance = (x.abs().unsqueeze(-1) - _E2M1).abs()
    nearest = distance.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 * 1e-7
    code = (torch.where(distance == nearest, 0.0, torch.inf) + even).argmin(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def _pairs(codes: Tensor) -> Tensor:
    """Pack two codes into a byte, the first in the lower half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def pack_words(x: Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned integers without gaps in 32-bit words along an axis; nibble i of a word has number order[i] of eight."""
    numbers = x.movedim(axis, -1)
    numbers = numbers.unflatten(-1, (-1, 8))[..., order].flatten(-2) if order else numbers
    single = numbers.to(torch.uint8).numpy()[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    packed = torch.from_numpy(np.packbits(single.reshape(*single.shape[:-2], -1), axis=-1, bitorder="little"))
    whole = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    return whole.view(torch.int32).movedim(-1, axis).contiguous()


def _ct(preset: str, block: Callable[[Tensor], tuple[int, int]], limit: float, **changed: Any) -> Maker:
    """A layout of compressed-tensors: its own compressor, with scales of ours."""

    def make(name: str, w: Tensor, amax: float) -> Tensors:
        from compressed_tensors.compressors.base import BaseCompressor

        scheme, size = scheme_of(preset, **changed), block(w)
        state = {"weight": w, "weight_scale": _scales(w, size, limit)}
        if preset == "FP8":
            state["weight_scale"] = torch.tensor([amax / limit])
        if preset.startswith("NVFP4"):
            state["weight_global_scale"] = torch.tensor([448.0 * 6.0 / amax])
            state["weight_scale"] = (
                (state["weight_scale"] * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
            )
            state["weight_scale"] = torch.where(state["weight_scale"] == 0, 2.0**-9, state["weight_scale"])
        if preset.startswith("MX"):
            state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(state["weight_scale"])))
        if not scheme.weights.symmetric:
            low, high = _range_of_groups(w, size[1])
            half = 2 ** (scheme.weights.num_bits - 1)
            state["weight_scale"] = ((high - low) / (2 * half - 1)).clamp_min(1e-6)
            zeros = (-half - low / state["weight_scale"]).round().clamp(-half, half - 1)
            state["weight_zero_point"] = zeros.to(torch.int8)
        written = BaseCompressor.get_value_from_registry(_FORMATS[preset]).compress(state, scheme)
        stem = name.removesuffix("weight")
        inputs = {leaf: torch.tensor([4.0])} if (leaf := input_scale_name(_settings_of_inputs(scheme))) else {}
        return {stem + k: v.contiguous() for k, v in (written | inputs).items()}

    return make


def _settings_of_inputs(scheme: Any) -> dict[str, Any] | None:
    inputs = scheme.input_activations
    return None if inputs is None else json.loads(inputs.model_dump_json())


def _range_of_groups(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = w.view(len(w), -1, group)
    return groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)


_FORMATS = {
    "FP8": "float-quantized", "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized",
    "W8A8": "int-quantized", "MXFP8": "mxfp8-quantized", "MXFP4": "mxfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized", "NVFP4": "nvfp4-pack-quantized", "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized", "W8A16": "pack-quantized",
}  # fmt: skip


def _fp8(block: tuple[int, int], kind: str) -> Maker:
    """transformers' own: e4m3fn and a scale that multiplies, as fp32, bf16, or powers of two."""

    def make(name: str, w: Tensor, amax: float) -> Tensors:
        scales = _scales(w, block, 448.0)
        if kind in ("ue8m0", "bytes"):
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
        if kind == "bf16":
            scales = (scales * (1 + 2**-7)).bfloat16().float()  # rounded up, so that nothing overflows
        codes = (w / _spread(scales, block, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"fp32": scales, "bf16": scales.bfloat16(), "ue8m0": scales.to(torch.float8_e8m0fnu)}
        stored["bytes"] = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        return {name: codes, name + "_scale_inv": stored[kind]}

    return make


def _modelopt_nvfp4(name: str, w: Tensor, amax: float) -> Tensors:
    second = torch.tensor(amax / (448.0 * 6.0))
    scales = (_scales(w, (1, 16), 6.0) / second).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    codes = _fp4(w / (_spread(scales.float(), (1, 16), w.shape) * second))
    stem = name.removesuffix("weight")
    extra = {stem + "input_scale": torch.tensor(0.01)}
    return {name: _pairs(codes), name + "_scale": scales, name + "_scale_2": second} | extra


def _modelopt_fp8(name: str, w: Tensor, amax: float) -> Tensors:
    scale = torch.tensor(amax / 448.0)
    return {name: (w / scale).to(torch.float8_e4m3fn), name + "_scale": scale}


def _modelopt_mxfp4(name: str, w: Tensor, amax: float) -> Tensors:
    scales = _scales(w, (1, 32), 6.0)
    exponents = torch.where(scales == 0, 0.0, torch.ceil(torch.log2(scales)))
    codes = _fp4(w / _spread(torch.exp2(exponents), (1, 32), w.shape))
    return {name: _pairs(codes), name + "_scale": (exponents + 127).to(torch.uint8)}


def _modelopt_blocks(name: str, w: Tensor, amax: float) -> Tensors:
    scales = _scales(w, (128, 128), 448.0)
    codes = (w / _spread(scales, (128, 128), w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, name + "_scale": scales[:, None, :, None]}


def _modelopt_int8(name: str, w: Tensor, amax: float) -> Tensors:
    scales = _scales(w, _rows(w), 127.0)
    return {name: (w / scales).round().to(torch.int8), name + "_scale": scales.flatten()}


def _modelopt_int4(name: str, w: Tensor, amax: float, *, w4a8: bool = False) -> Tensors:
    """Rows 2i and 2i + 1 in the halves of a byte; the columns of what no norm stands before were divided by powers."""
    stem, extra, columns = name.removesuffix("weight"), {}, torch.ones(w.shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        columns = torch.exp2(torch.arange(w.shape[1]) % 3 - 1.0)
        extra = {stem + "pre_quant_scale": columns.bfloat16()}
    if w4a8:
        extra |= {name + "_scale_2": torch.tensor(amax / 448.0), stem + "input_scale": torch.tensor(0.01)}
    scales = _scales(w / columns, (1, 32), 7.0)
    codes = (w / columns / _spread(scales, (1, 32), w.shape)).round().clamp(-8, 7).to(torch.int8)
    return {name: (codes[0::2] & 15 | codes[1::2] << 4).view(torch.uint8), name + "_scale": scales, **extra}


def _modelopt_nvfp4_awq(name: str, w: Tensor, amax: float) -> Tensors:
    columns = torch.exp2(torch.arange(w.shape[1]) % 3 - 1.0)
    found = _modelopt_nvfp4(name, w / columns, 2 * amax)
    return found | {name.removesuffix("weight") + "pre_quant_scale": columns.bfloat16()}


def _gptq(
    name: str, w: Tensor, amax: float, *, group: int = 32, bits: int = 4, version: int = 1, shuffled: bool = False
) -> Tensors:
    """AutoGPTQ: [in, out] words of inputs, zero points less one. Shuffled: as desc_act leaves the groups."""
    w_KN, stem = w.t(), name.removesuffix("weight")
    order = torch.arange(len(w_KN)) // group
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    groups = int(order.max()) + 1
    low = torch.stack([w_KN[order == g].amin(0).clamp_max(0) for g in range(groups)])
    high = torch.stack([w_KN[order == g].amax(0).clamp_min(0) for g in range(groups)])
    top = 2**bits - 1
    scales = ((high - low) / top).clamp_min(1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (w_KN / scales.float()[order] + zeros[order]).round().clamp(0, top)
    stored = (zeros - 1) % (top + 1) if version == 1 else zeros
    return {
        stem + "qweight": pack_words(codes, bits, 0),
        stem + "qzeros": pack_words(stored, bits, 1),
        stem + "scales": scales,
        stem + "g_idx": order.to(torch.int32),
    }


def _awq(name: str, w: Tensor, amax: float, *, group: int = 32) -> Tensors:
    w_KN, stem = w.t(), name.removesuffix("weight")
    grouped = w_KN.reshape(-1, group, w_KN.shape[1])
    low, high = grouped.amin(1).clamp_max(0), grouped.amax(1).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    wide, wide_zeros = scales.float().repeat_interleave(group, 0), zeros.repeat_interleave(group, 0)
    codes = (w_KN / wide + wide_zeros).round().clamp(0, 15)
    packed = {"qweight": pack_words(codes, 4, 1, AWQ_ORDER), "qzeros": pack_words(zeros, 4, 1, AWQ_ORDER)}
    return {stem + k: x for k, x in packed.items()} | {stem + "scales": scales}


def gpt_oss(name: str, w_EKN: Tensor) -> Tensors:
    """Experts on their side, 32 numbers of an input to 16 bytes."""
    w_ENK = w_EKN.transpose(1, 2)
    experts, rows, cols = w_ENK.shape
    groups = w_ENK.reshape(experts, rows, cols // 32, 32)
    amax = groups.abs().amax(-1, keepdim=True)
    scales = torch.where(amax == 0, 1.0, torch.exp2(torch.ceil(torch.log2(amax / 6.0))))
    exponents = (torch.log2(scales).squeeze(-1) + 127).to(torch.uint8)
    return {name + "_blocks": _pairs(_fp4(groups / scales)), name + "_scales": exponents}


def _rows(w: Tensor) -> tuple[int, int]:
    return 1, w.shape[1]


def _group(n: int) -> Callable[[Tensor], tuple[int, int]]:
    return lambda w: (1, n)


def _ct_config(preset: str, **changed: Any) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationConfig

    group = json.loads(scheme_of(preset, **changed).model_dump_json())
    config = json.loads(QuantizationConfig(config_groups={"group_0": group}).model_dump_json())
    return {**config, "format": _FORMATS[preset], "quantization_status": "compressed", "ignore": ["lm_head"]}


_W4, _W3 = {"group_size": 32}, {"group_size": 32, "num_bits": 3}
# The layouts by name: what makes the tensors of a weight, and the config beside them.
MAKERS: Mapping[str, tuple[Maker, Callable[[], dict[str, Any]]]] = {
    "ct FP8": (_ct("FP8", lambda w: (w.shape[0], w.shape[1]), 448.0), lambda: _ct_config("FP8")),
    "ct FP8_DYNAMIC": (_ct("FP8_DYNAMIC", _rows, 448.0), lambda: _ct_config("FP8_DYNAMIC")),
    "ct FP8_BLOCK": (_ct("FP8_BLOCK", lambda w: (128, 128), 448.0), lambda: _ct_config("FP8_BLOCK")),
    "ct W8A8": (_ct("W8A8", _rows, 127.0), lambda: _ct_config("W8A8")),
    "ct MXFP8": (_ct("MXFP8", _group(32), 448.0), lambda: _ct_config("MXFP8")),
    "ct MXFP4": (_ct("MXFP4", _group(32), 6.0), lambda: _ct_config("MXFP4")),
    "ct NVFP4": (_ct("NVFP4A16", _group(16), 6.0), lambda: _ct_config("NVFP4A16")),
    "ct NVFP4, inputs": (_ct("NVFP4", _group(16), 6.0), lambda: _ct_config("NVFP4")),
    "ct W4A16": (_ct("W4A16", _group(32), 7.0, **_W4), lambda: _ct_config("W4A16", **_W4)),
    "ct W4A16_ASYM": (_ct("W4A16_ASYM", _group(32), 7.0, **_W4), lambda: _ct_config("W4A16_ASYM", **_W4)),
    "ct W3A16_ASYM": (_ct("W4A16_ASYM", _group(32), 3.0, **_W3), lambda: _ct_config("W4A16_ASYM", **_W3)),
    "ct W8A16": (_ct("W8A16", _group(32), -128.0, **_W4), lambda: _ct_config("W8A16", **_W4)),  # signs as AutoRound's
    "fp8": (_fp8((128, 128), "fp32"), lambda: {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 bf16": (_fp8((128, 128), "bf16"), lambda: {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 ue8m0": (
        _fp8((128, 128), "ue8m0"),
        lambda: {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "mxfp8": (
        _fp8((1, 32), "bytes"),
        lambda: {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    ),
    "modelopt FP8": (_modelopt_fp8, lambda: {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt FP8 blocks": (_modelopt_blocks, lambda: {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}),
    "modelopt INT8": (_modelopt_int8, lambda: {"quant_method": "modelopt", "quant_algo": "W8A16"}),
    "modelopt MXFP4": (_modelopt_mxfp4, lambda: {"quant_method": "modelopt", "quant_algo": "mxfp4"}),
    "modelopt W4A16_AWQ": (_modelopt_int4, lambda: {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
    "modelopt W4A8_AWQ": (
        lambda name, w, amax: _modelopt_int4(name, w, amax, w4a8=True),
        lambda: {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    ),
    "modelopt NVFP4_AWQ": (_modelopt_nvfp4_awq, lambda: {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}),
    "modelopt NVFP4": (_modelopt_nvfp4, lambda: {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "gptq": (_gptq, lambda: {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "gptq 3": (
        lambda name, w, amax: _gptq(name, w, amax, bits=3),
        lambda: {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "gptq desc_act": (
        lambda name, w, amax: _gptq(name, w, amax, shuffled=True, version=2),
        lambda: {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (_awq, lambda: {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}


def quantised(name: str) -> bool:
    """Whether these layouts quantize this tensor of a decoder."""
    return name.endswith("_proj.weight")


def make_foreign(layout: str, plain: Path, target: Path) -> Path:
    """Rewrite a plain checkpoint in a third-party layout."""
    make, config_of = MAKERS[layout]
    target.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
    stored: Tensors = {}
    weights = load_file(plain / "model.safetensors")
    amax = {n: float(x.abs().max()) for n, x in weights.items()}
    for _, names in fused_groups(weights):
        amax |= dict.fromkeys(names, max(amax[n] for n in names))
    for name, x in weights.items():
        stored |= make(name, x.float(), amax[name]) if quantised(name) else {name: x}
    save_file({n: x.contiguous() for n, x in stored.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": config_of()}))
    return target
