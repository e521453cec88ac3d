"""Schemes: a layout, format, granularity and method under one well-known name.

Upper-case names without a prefix are presets of compressed-tensors, as in vLLM and llm-compressor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lpconv.methods import TRANSFORMERS
from lpconv.storage.compressed import COMPRESSED_TENSORS
from lpconv.storage.gguf import GGUF

_VLLM = "transformers with compressed-tensors; vLLM (not tested)"
_TRIED = "vLLM (tested on a CPU); transformers with compressed-tensors"
_MLX, _LLAMA_CPP = "mlx-lm", "llama.cpp"
_PLAIN = "transformers; SGLang and vLLM (not tested)"
_OURS = "transformers with `import lpconv.hf` or trust_remote_code"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Values of `ConvertOptions` under one name.

    `bits` are stored bits per weight including scales, for a matrix of 4096 columns. `opens` lists the readers of the
    output, and `use` when to choose the scheme. `calibrated`: the input scales need a text (`--calibrate`).
    """

    options: Mapping[str, str]
    bits: float
    opens: str
    use: str
    calibrated: bool = False


def _compressed(
    format: str, granularity: str, bits: float, use: str, *, opens: str = _VLLM, calibrated: bool = False
) -> Scheme:
    options = {"layout": COMPRESSED_TENSORS, "format": format, "granularity": granularity}
    return Scheme(options=options, bits=bits, opens=opens, use=use, calibrated=calibrated)


def _gguf(format: str, granularity: str, bits: float, use: str) -> Scheme:
    options = {"layout": GGUF, "format": format, "granularity": granularity}
    return Scheme(options=options, bits=bits, opens=_LLAMA_CPP, use=use)


def _mlx(format: str, granularity: str, bits: float, use: str) -> Scheme:
    return Scheme(
        options={"layout": "mlx", "format": format, "granularity": granularity}, bits=bits, opens=_MLX, use=use
    )


SCHEMES: dict[str, Scheme] = {
    "FP8_DYNAMIC": _compressed("e4m3fn", "row", 8.01, "serving on unknown hardware; inputs in fp8", opens=_TRIED),
    "FP8": _compressed("e4m3fn", "tensor", 8, "serving with static input scales; inputs in fp8", calibrated=True),
    "FP8_BLOCK": _compressed("e4m3fn", "128x128", 8, "scales per block, as in DeepSeek-V3; inputs in fp8"),
    "W8A16": _compressed("int8", "group:128", 8.125, "8-bit integers; inputs in 16 bits"),
    "W4A16": _compressed("int4", "group:128", 4.125, "4-bit integers; inputs in 16 bits", opens=_TRIED),
    "MXFP8": _compressed("e4m3fn", "mx", 8.25, "GPUs that multiply MXFP8; inputs in MXFP8"),
    "MXFP4A16": _compressed("e2m1", "mx", 4.25, "4-bit floats; inputs in 16 bits"),
    "NVFP4A16": _compressed("e2m1", "nvfp4", 4.5, "4-bit floats with finer scales; inputs in 16 bits"),
    "NVFP4": _compressed("e2m1", "nvfp4", 4.5, "GPUs that multiply NVFP4; inputs in NVFP4", calibrated=True),
    "TRANSFORMERS_FP8": Scheme(
        options={"layout": TRANSFORMERS, "format": "e4m3fn", "granularity": "128x128"},
        bits=8,
        opens=_PLAIN,
        use="plain transformers, in DeepSeek-V3's layout",
    ),
    "TRANSFORMERS_MXFP8": Scheme(
        options={"layout": TRANSFORMERS, "format": "e4m3fn", "granularity": "mx"},
        bits=8.25,
        opens=_PLAIN,
        use="plain transformers, MXFP8",
    ),
    "MLX_MXFP4": _mlx("e2m1", "mx", 4.25, "Apple computers; 4-bit floats"),
    "MLX_MXFP8": _mlx("e4m3fn", "mx", 8.25, "Apple computers; 8-bit floats"),
    "MLX_INT4": _mlx("int4", "group:64", 5, "Apple computers; 4-bit integers"),
    "MLX_INT8": _mlx("int8", "group:64", 9, "Apple computers; 8-bit integers"),
    "GGUF_F16": _gguf("fp16", "tensor", 16, "llama.cpp without loss, if fp16 holds the weights"),
    "GGUF_BF16": _gguf("bf16", "tensor", 16, "llama.cpp, for weights that are bf16"),
    "GGUF_Q8_0": _gguf("int8", "group:32", 8.5, "llama.cpp, 8-bit integers"),
    "GGUF_Q4_0": _gguf("int4", "group:32", 4.5, "llama.cpp, 4-bit integers"),
    "GGUF_MXFP4": _gguf("e2m1", "mx", 4.25, "llama.cpp, 4-bit floats"),
    "UNIT_FP16": Scheme(
        options={"method": "unit", "format": "fp16"}, bits=16, opens=_OURS, use="scaled training in fp16; half of fp32"
    ),
    "UNIT_FP8": Scheme(
        options={"method": "unit", "format": "e4m3fn"}, bits=8, opens=_OURS, use="scaled training in fp8"
    ),
    "COLLAGE": Scheme(
        options={"method": "collage", "residual": "exact16"},
        bits=32,
        opens="transformers, as plain bf16; lpconv adds what bf16 lost",
        use="training in bf16 without an fp32 copy; nothing is lost",
    ),
    "MULTIPOINT": Scheme(
        options={"method": "multipoint", "format": "int4"},
        bits=4.5,
        opens=_OURS,
        use="4.5 bits per weight without calibration data; rows that need more get more",
    ),
}
