"""Gap in fp32 between scaled and plain fine-tuning of architectures that scaled tensors once trained wrong.

    python -m benchmarks.finetune_architectures --out benchmarks/results/finetune-architectures.json

Each is a small random model with the tokenizer of the embedded one, fine-tuned for a few steps by `lpconv finetune
--recipe unit-fp8 --precision fp32` beside its fp32 twin. The gap must be 0, or the command must refuse the model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto

from benchmarks.architectures import classes, small_config
from lpconv.data import demo_checkpoint

CLASSES = (
    "DebertaForMaskedLM", "RwkvForCausalLM", "Qwen3NextForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "FunnelForMaskedLM", "LongformerForMaskedLM", "LEDForConditionalGeneration", "KimiLinearForCausalLM",
    "MambaForCausalLM", "ModernBertForMaskedLM", "Wav2Vec2ForCTC",
)  # fmt: skip


def save(class_name: str, folder: Path) -> None:
    """A small random model of the class, and the embedded tokenizer with a token for masks."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_checkpoint())
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": tokenizer.pad_token or "<pad>"})
    config = small_config(configuration_auto.CONFIG_MAPPING[classes()[class_name]])
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 1024  # some count positions from the padding id on
    torch.manual_seed(0)
    getattr(transformers, class_name)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gap_of(class_name: str) -> dict[str, Any]:
    """The gap of a run in fp32, or the words of the refusal."""
    with tempfile.TemporaryDirectory() as name:
        model, out = Path(name) / "model", Path(name) / "tuned"
        save(class_name, model)
        command = [sys.executable, "-m", "lpconv", "finetune", str(model), "--recipe", "unit-fp8",
                   "--precision", "fp32", "--steps", "4", "--seq-len", "32", "--batch-size", "2", "--eval-batches", "2",
                   "--track-every", "0", "--json", "-q", "-o", str(out)]  # fmt: skip
        if class_name == "LEDForConditionalGeneration":
            pairs = [{"text": f"To be or not to be, {i}", "target": f"that is the question {i}"} for i in range(40)]
            data = Path(name) / "pairs.jsonl"
            data.write_text("\n".join(map(json.dumps, pairs)))
            command += ["--data", str(data), "--text-column", "text", "--label-column", "target"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if x.startswith(("error", "hint"))]
        return {"class": class_name, "code": done.returncode, "refused": " ".join(lines)[:500] or done.stderr[-500:]}
    gaps = {g["metric"]: g["gap"] for g in json.loads(done.stdout)["gaps"]}
    return {"class": class_name, "code": 0, "gaps": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=CLASSES)
    args = parser.parse_args()
    rows = []
    for class_name in args.only:
        rows.append(gap_of(class_name))
        print(rows[-1], flush=True)
    document = {"torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
