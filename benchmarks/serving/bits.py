"""Do the runtimes' own functions decode the weights that lpconv wrote to the same numbers as lpconv?

Converts a given model, all-MiniLM-L6-v2 and a small random mixture of experts to every layout for other tools. Each
weight is decoded by the decompressor of compressed-tensors, by mlx's `dequantize` in its own environment, by
`gguf.dequantize` or by ONNX Runtime's `DequantizeLinear`, and compared with lpconv's bit for bit. If a decoder returns
bf16, lpconv's numbers are rounded to bf16 first. `read` counts the weights that the decoder reads as codes: mlx-lm and
ONNX have none for experts.
"""

import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Rows, command, environment, machine, parser, versions, work_folder
from benchmarks.models import minilm
from benchmarks.serving.mlx import PACKAGES
from benchmarks.serving.vllm import random_experts
from lpconv.convert.run import convert
from lpconv.errors import UnsupportedError
from lpconv.export.options import ExportOptions
from lpconv.export.run import export_onnx
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions

Decoded = Iterator[tuple[str, Tensor]]
# Decodes one file into another, in the environment with mlx.
MLX_CHILD = """
import json, sys
import mlx.core as mx
stored = mx.load(f"{sys.argv[1]}/model.safetensors")
settings = json.load(open(f"{sys.argv[1]}/config.json"))["quantization"]
decoded = {}
for name in [n.removesuffix(".scales") for n in stored if n.endswith(".scales")]:
    s = {k: v for k, v in {**settings, **settings.get(name, {})}.items() if k in ("group_size", "bits", "mode")}
    parts = stored[f"{name}.weight"], stored[f"{name}.scales"], stored.get(f"{name}.biases")
    decoded[f"{name}.weight"] = mx.dequantize(*parts, **s, dtype=mx.float32)
mx.save_safetensors(sys.argv[2], decoded)
"""


def by_compressed_tensors(output: Path, stored: StoredTensors) -> Decoded:
    """Weights by the decompressor of compressed-tensors for the format in the config."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors import safe_open

    written = json.loads((output / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(written).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(written["format"])
    with safe_open(output / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        for name in coded(stored):
            stem = name.removesuffix("weight")
            parts = {n.removeprefix(stem): file.get_tensor(n) for n in keys if n.startswith(stem)}
            yield name, compressor.decompress(parts, scheme)["weight"]


def by_gguf(output: Path, stored: StoredTensors) -> Decoded:
    """Weights by the gguf package, with rows in the order of transformers."""
    import gguf

    from lpconv.gguf.arranged import arranged

    table = json.loads((output / "config.json").read_text())["quantization_config"]["tensors"]
    tensors = {t.name: t for t in gguf.GGUFReader(output / "model.gguf").tensors}
    for name in coded(stored):
        entry, wanted = table[name], stored.tensor(name)
        theirs = tensors[entry["name"]]
        values = torch.tensor(gguf.dequantize(theirs.data, theirs.tensor_type)).float()
        if entry["order"]:  # undo the order of elements in the file
            positions = arranged(torch.arange(wanted.numel()).view(wanted.shape), entry["order"])
            values = values.flatten()[positions.flatten().argsort()]
        yield name, values.view(wanted.shape)


def by_mlx(output: Path, stored: StoredTensors, python: Path) -> Decoded:
    """Weights by mlx's `dequantize`."""
    from safetensors import safe_open

    decoded = output.parent / "decoded.safetensors"
    subprocess.run([python, "-c", MLX_CHILD, output, decoded], check=True)
    with safe_open(decoded, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def by_onnx(output: Path, stored: StoredTensors) -> Decoded:
    """Results of every `DequantizeLinear` of the exported graph, matched by value because their names differ."""
    import onnx
    import onnxruntime

    exported = output.parent / f"{output.name}-onnx"
    with warnings.catch_warnings(action="ignore"):  # about experts, which the export keeps in fp32
        export_onnx(output, exported, ExportOptions(validate=False, force=True))
    model = onnx.load(exported / "model.onnx")
    constants = {c.name: c for c in model.graph.initializer}
    names = {digest(stored.tensor(name)): name for name in coded(stored)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for node in model.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        result = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
        graph = onnx.helper.make_graph([node], "one", [], [result], [constants[n] for n in node.input if n])
        one = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        session = onnxruntime.InferenceSession(one.SerializeToString(), options)
        values = torch.from_numpy(session.run(None, {})[0])
        yield names.get(digest(values), node.name), values


def digest(values: Tensor) -> bytes:
    """A hash of the shape and the fp32 values."""
    import hashlib

    return hashlib.sha256(repr(values.shape).encode() + values.float().contiguous().numpy().tobytes()).digest()


def coded(stored: StoredTensors) -> list[str]:
    """Names of the weights stored as codes."""
    from lpconv.forms import Kept

    return [n for n, form in stored.forms.items() if form.format is not None and not isinstance(form, Kept)]


_CT = {"layout": "compressed-tensors"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "compressed-tensors": {
        **{s: {"scheme": s} for s in ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "MXFP8", "MXFP4", "MXFP4A16", "NVFP4A16")},
        "FP8, weights only": _CT | {"format": "e4m3fn"},
        **{f"W{b}A16, groups of 64": _CT | {"format": f"int{b}", "granularity": "group:64"} for b in range(2, 9)},
    },
    "mlx": {s: {"scheme": s} for s in ("MLX_MXFP4", "MLX_MXFP8", *(f"MLX_INT{b}" for b in (2, 3, 4, 5, 6, 8)))},
    "gguf": {s: {"scheme": s} for s in ("GGUF_F16", "GGUF_BF16", "GGUF_Q8_0", "GGUF_Q4_0", "GGUF_MXFP4")},
    "onnx": {
        "e4m3fn": {"format": "e4m3fn"},
        "e4m3fn, a scale per row": {"format": "e4m3fn", "granularity": "row"},
        "int8, groups of 32": {"format": "int8", "granularity": "group:32"},
        "int4, groups of 32": {"format": "int4", "granularity": "group:32"},
    },
}
DECODERS: dict[str, Callable[..., Decoded]] = {
    "compressed-tensors": by_compressed_tensors, "mlx": by_mlx, "gguf": by_gguf, "onnx": by_onnx,
}  # fmt: skip
_PACKAGES = {"onnx": "onnxruntime"}


def has_same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal in the dtype of the second, including signs of zeros."""
    whole = {2: torch.int16, 4: torch.int32}[theirs.element_size()]
    ours = ours.to(theirs.dtype)
    return ours.shape == theirs.shape and torch.equal(ours.view(whole), theirs.contiguous().view(whole))


def measure(model: Path, layout: str, case: str, folder: Path, *more: Path) -> dict[str, Any]:
    """Convert a model to one layout and count the weights that its decoder decodes to lpconv's values."""
    output = folder / f"{model.parent.name if model.name == 'model' else model.name}-{layout}"
    try:
        convert(str(model), output, ConvertOptions(**CASES[layout][case], verify="none", force=True))
    except UnsupportedError as refusal:
        return {"refused": str(refusal)}
    num_read, equal, dtypes = 0, 0, set()
    with StoredTensors.open(output) as stored:
        names = set(coded(stored))
        for name, values in DECODERS[layout](output, stored, *more):
            dtypes.add(str(values.dtype).removeprefix("torch."))
            num_read += 1
            equal += name in names and has_same_bits(stored.tensor(name), values)
    return {"weights": len(names), "read": num_read, "equal": equal, "dtype": ", ".join(sorted(dtypes))}


def main() -> None:
    """Run every case that the result lacks, and save the result after each."""
    made = parser(__doc__, work="where the environment with mlx and the converted models are kept")
    made.add_argument("model", type=Path, help="a Llama with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--models", nargs="+", help="only these models of the result")
    made.add_argument("--layouts", nargs="+", choices=CASES, default=list(CASES))
    made.add_argument("--cases", nargs="+", help="only these cases of the layouts")
    options = made.parse_args()
    shown = command().replace(str(options.model), "MODEL")
    rows = Rows(options.out, ("model", "layout", "case"), lambda: {"command": shown, "machine": machine("gguf")})
    with work_folder(options.work) as folder:
        for name in options.models or ("all-MiniLM-L6-v2", "random Qwen3-MoE", options.model.name):
            model = model_of(name, folder, options.model)
            for layout in options.layouts:
                package = _PACKAGES.get(layout, layout)
                more = (environment(folder / "mlx-env", PACKAGES),) if layout == "mlx" else ()
                release = version_in(more[0], package) if more else versions(package)[package]
                for case in (c for c in CASES[layout] if c in (options.cases or CASES[layout])):
                    if rows.has(name, layout, case):
                        continue
                    facts = {"model": name, "layout": layout, "case": case, "decoder": package, "version": release}
                    rows.put(facts | measure(model, layout, case, folder, *more))


def model_of(name: str, folder: Path, model: Path) -> Path:
    """The folder of a model by its name in the result."""
    if name == "random Qwen3-MoE":
        return random_experts(folder / "qwen3-moe", model)
    return minilm() if name == "all-MiniLM-L6-v2" else model


def version_in(python: Path, package: str) -> str:
    """The version of a package in another environment."""
    script = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
