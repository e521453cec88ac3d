"""Mixtures of experts in the layouts of others: what is converted, who decodes the same, and whether they run.

    python -m benchmarks.experts --out benchmarks/results/experts.json

Draws small Qwen3-MoE, Mixtral, DeepSeek-V2, GraniteMoE, GraniteMoE-hybrid and gpt-oss models in bf16, saves them by
transformers, and converts each into the layouts of `LAYOUTS`. Of each output it says

- which share of the bytes of experts in the source became codes;
- of how many converted weights compressed-tensors' own decompressor, or transformers' `Fp8Dequantize`, gives our bits;
- what plain transformers, in a process where lpconv cannot be imported, makes of it: parameters that are equal to ours
  in the dtype of theirs, and how far its logits are from those of the weights that lpconv decodes, and of the source's.

What is refused is listed with the words of the error; then what `--exclude` keeps is converted and opened. Our own
layout is verified in fp32. Then a Llama with extra `mtp.*` weights goes through all layouts: problems that `inspect`
finds, and kept weights that the config does not name. Needs compressed-tensors, and no network.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.checkpoint.resolve import directory_of
from lpconv.convert.inspect import inspect
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.forms.reader import StoredTensors
from lpconv.models.load import load
from lpconv.results import ConvertResult

LAYOUTS: dict[str, dict[str, Any]] = {
    "FP8": {},
    "FP8_DYNAMIC": {"granularity": "row"},
    "FP8_BLOCK": {"granularity": "128x128"},
    "MXFP8": {"granularity": "mx"},
    "W4A16": {"granularity": "group:128", "format": "int4"},
    "W8A16": {"granularity": "group:128", "format": "int8"},
    "NVFP4A16": {"granularity": "nvfp4", "format": "e2m1"},
    "NVFP4A16, exact scales": {"granularity": "nvfp4", "format": "e2m1", "scale": "exact"},
    "MXFP4A16": {"granularity": "mx", "format": "e2m1"},
    "transformers fp8": {"granularity": "128x128", "layout": "transformers"},
    "transformers mxfp8": {"granularity": "mx", "layout": "transformers"},
}
_COMMON = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8}),
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", {
        "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
        "topk_group": 1, "n_group": 1,
    }),
    "GraniteMoE": ("GraniteMoeForCausalLM", {"num_local_experts": 4}),
    "GraniteMoE-hybrid": ("GraniteMoeHybridForCausalLM", {
        "num_local_experts": 4, "shared_intermediate_size": 256, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
    }),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 64}),
}  # fmt: skip
_INPUTS = "input_ids=torch.arange(3, 67).view(4, 16)"
# Run where lpconv cannot be imported; leaves logits and parameters as they are once the model has run.
_SCRIPT = f"""
import sys
sys.modules["lpconv"] = None
import torch
import transformers
path, out = sys.argv[1:]
model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    logits = model({_INPUTS}).logits
torch.save((logits, {{n: p.detach() for n, p in model.named_parameters()}}), out)
"""


def draw(name: str, folder: Path) -> Path:
    cls = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    cls(cls.config_class(**_COMMON, **MODELS[name][1])).to(torch.bfloat16).save_pretrained(folder)
    return folder


def converted(source: Path, out: Path, layout: str, **more: Any) -> ConvertResult:
    asked = {"format": "e4m3fn", "layout": "compressed-tensors", "verify": "weights", **LAYOUTS[layout], **more}
    return convert(str(source), out, ConvertOptions(**asked))


def row_of(source: Path, out: Path, layout: str) -> dict[str, Any]:
    """What became of one model in one layout."""
    try:
        result, kept = converted(source, out, layout), {}
    except LpconvError as e:
        block = "*experts*" if "experts" in e.message.split("`")[1] else "*block_sparse_moe*"
        result = converted(source, out, layout, exclude=(block,))
        kept = {"refused": e.message, "exit_code": e.exit_code, "hint": e.hint, "kept_by_exclude": block}
    experts = [t for t in result.tensors if "experts." in t.name or "_linear.weight" in t.name]
    size = {t.name: torch.Size(t.shape).numel() for t in experts}
    coded = sum(size[t.name] for t in experts if t.action == "convert")
    return {
        **kept,
        "share_of_experts": coded / sum(size.values()),
        "file_share": result.bytes.written / result.bytes.read,
        **decoded_by_package(out),
        **opened_by_transformers(out, source),
        "inspect_problems": inspect(out).problems,
        "warnings": result.warnings,
    }


def decoded_by_package(path: Path) -> dict[str, Any]:
    """How many converted weights the reader's own code decodes to our bits."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    state = load_file(path / "model.safetensors")
    with StoredTensors.open(path) as stored:
        names = [n for n, form in stored.forms.items() if form.format is not None]
        theirs = {
            n: _decoded({k.removeprefix(n): x for k, x in state.items() if k.startswith(n)}, config) for n in names
        }
        equal = sum(torch.equal(stored.tensor(n).to(x.dtype), x) for n, x in theirs.items())
    return {"weights": len(names), "equal_to_package": equal}


def _decoded(parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """A weight by the code of its reader; `parts` are its tensors by what follows its name."""
    if config["quant_method"] != "compressed-tensors":
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        found: Tensor = Fp8Dequantize(None)._dequantize_one(parts[""], parts["_scale_inv"], torch.float32)
        return found
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    weight: Tensor = compressor.decompress({f"weight{k}": x for k, x in parts.items()}, scheme)["weight"]
    return weight


def opened_by_transformers(path: Path, source: Path) -> dict[str, Any]:
    out = path.with_suffix(".pt")
    done = subprocess.run([sys.executable, "-c", _SCRIPT, path, out], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"plain_transformers": done.stderr.strip().splitlines()[-1][:200]}
    logits, theirs = torch.load(out)
    out.unlink()
    ours = dict(load(path, dtype=torch.float32).named_parameters())
    same = [torch.equal(ours[n].to(x.dtype), x) for n, x in theirs.items() if n in ours]
    found = {"plain_transformers": "runs", "parameters": len(same), "equal_to_ours": sum(same)}
    for name, checkpoint in (("decoded", path), ("source", source)):
        with torch.inference_mode():
            wanted = load(checkpoint)(input_ids=torch.arange(3, 67).view(4, 16)).logits.float()
        found[f"logits_from_{name}"] = float((logits.float() - wanted).norm() / wanted.norm())
    return found


def extra_weights(work: Path) -> dict[str, Any]:
    """A Llama with a layer for one more token, which transformers leaves out, in all layouts."""
    config = transformers.LlamaConfig(**{k: v for k, v in _COMMON.items() if k != "num_experts_per_tok"})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "mtp")
    state = load_file(work / "mtp/model.safetensors")
    layer = {n.replace("model.layers.0", "mtp.layers.0"): x.clone() for n, x in state.items() if "layers.0." in n}
    state |= layer | {"mtp.fc.weight": torch.ones(256, 512).bfloat16(), "mtp.embed_tokens.weight": torch.ones(256, 256)}
    save_file(state, work / "mtp/model.safetensors", {"format": "pt"})
    rows = {}
    for layout in LAYOUTS:
        out = work / f"mtp {layout}"
        result = converted(work / "mtp", out, layout)
        found = json.loads((out / "config.json").read_text())["quantization_config"]
        named = {*(found.get("ignore") or found["modules_to_not_convert"]), "model.embed_tokens"}
        kept = [t.name for t in result.tensors if t.action == "keep" and len(t.shape) > 1]
        rows[layout] = {
            "kept": len(kept),
            "not_named": [n for n in kept if n.removesuffix(".weight") not in named],
            "inspect_problems": inspect(out).problems,
        }
    return rows


def own_layout(source: Path, out: Path) -> dict[str, Any]:
    found = convert(str(source), out, ConvertOptions(format="fp32")).verify
    return {"level": found.level, "passed": found.passed, "bit_equal": found.logits and found.logits.bit_equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    asked = parser.parse_args()
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "compressed-tensors")}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = directory_of(folder)
        for name in asked.models:
            source = draw(name, work / name)
            rows[name] = {"lpconv, unit fp32": own_layout(source, work / f"{name} own")}
            for layout in LAYOUTS:
                rows[name][layout] = row_of(source, work / f"{name} {layout}", layout)
                print(name, layout, rows[name][layout], flush=True)
        extra = extra_weights(work)
        print(extra)
    if asked.out is not None:
        document = {"versions": versions, "models": rows, "llama_with_mtp": extra}
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
