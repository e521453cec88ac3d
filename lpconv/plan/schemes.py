"""Schemes: a layout, format, granularity and method under one well-known name.

Upper-case names without a prefix are presets of compressed-tensors, as in vLLM and llm-compressor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lpconv.gguf import GGUF
from lpconv.methods import TRANSFORMERS
from lpconv.storage.compressed import COMPRESSED_TENSORS

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


# Every name in one layout: (name, layout, format, granularity, bits, readers, use). Two need calibrated input scales.
SCHEMES: dict[str, Scheme] = {
    name: Scheme(
        options={"layout": layout, "format": format, "granularity": granularity},
        bits=bits,
        opens=opens,
        use=use,
        calibrated=name in ("FP8", "NVFP4"),
    )
    for name, layout, format, granularity, bits, opens, use in (
        ("FP8_DYNAMIC", COMPRESSED_TENSORS, "e4m3fn", "row", 8.01, _TRIED,
         "serving on unknown hardware; inputs in fp8"),
        ("FP8", COMPRESSED_TENSORS, "e4m3fn", "tensor", 8, _VLLM, "serving with static input scales; inputs in fp8"),
        ("FP8_BLOCK", COMPRESSED_TENSORS, "e4m3fn", "128x128", 8, _VLLM,
         "scales per block, as in DeepSeek-V3; inputs in fp8"),
        ("W8A16", COMPRESSED_TENSORS, "int8", "group:128", 8.125, _VLLM, "8-bit integers; inputs in 16 bits"),
        ("W4A16", COMPRESSED_TENSORS, "int4", "group:128", 4.125, _TRIED, "4-bit integers; inputs in 16 bits"),
        ("MXFP8", COMPRESSED_TENSORS, "e4m3fn", "mx", 8.25, _VLLM, "GPUs that multiply MXFP8; inputs in MXFP8"),
        ("MXFP4A16", COMPRESSED_TENSORS, "e2m1", "mx", 4.25, _VLLM, "4-bit floats; inputs in 16 bits"),
        ("NVFP4A16", COMPRESSED_TENSORS, "e2m1", "nvfp4", 4.5, _VLLM,
         "4-bit floats with finer scales; inputs in 16 bits"),
        ("NVFP4", COMPRESSED_TENSORS, "e2m1", "nvfp4", 4.5, _VLLM, "GPUs that multiply NVFP4; inputs in NVFP4"),
        ("TRANSFORMERS_FP8", TRANSFORMERS, "e4m3fn", "128x128", 8, _PLAIN,
         "plain transformers, in DeepSeek-V3's layout"),
        ("TRANSFORMERS_MXFP8", TRANSFORMERS, "e4m3fn", "mx", 8.25, _PLAIN, "plain transformers, MXFP8"),
        ("MLX_MXFP4", "mlx", "e2m1", "mx", 4.25, _MLX, "Apple computers; 4-bit floats"),
        ("MLX_MXFP8", "mlx", "e4m3fn", "mx", 8.25, _MLX, "Apple computers; 8-bit floats"),
        ("MLX_INT4", "mlx", "int4", "group:64", 5, _MLX, "Apple computers; 4-bit integers"),
        ("MLX_INT8", "mlx", "int8", "group:64", 9, _MLX, "Apple computers; 8-bit integers"),
        ("GGUF_F16", GGUF, "fp16", "tensor", 16, _LLAMA_CPP, "llama.cpp without loss, if fp16 holds the weights"),
        ("GGUF_BF16", GGUF, "bf16", "tensor", 16, _LLAMA_CPP, "llama.cpp, for weights that are bf16"),
        ("GGUF_Q8_0", GGUF, "int8", "group:32", 8.5, _LLAMA_CPP, "llama.cpp, 8-bit integers"),
        ("GGUF_Q4_0", GGUF, "int4", "group:32", 4.5, _LLAMA_CPP, "llama.cpp, 4-bit integers"),
        ("GGUF_MXFP4", GGUF, "e2m1", "mx", 4.25, _LLAMA_CPP, "llama.cpp, 4-bit floats"),
    )
}  # fmt: skip
SCHEMES |= {
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
