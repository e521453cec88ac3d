"""A small valid file of every kind that lpconv reads, made once for `fuzz.py` and `kill.py`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from lpconv.data import demo_text
from tests.helpers.checkpoints import shallow_demo
from tests.helpers.foreign_files import MAKERS, make_foreign
from tests.helpers.gguf_files import rewrite_as_gguf
from tests.helpers.models import tiny, with_demo_tokenizer

TUNE = ("--steps", "2", "--seq-len", "16", "--batch-size", "2", "--eval-batches", "1",
         "--twin", "none", "-q")  # fmt: skip
PROBE = ("--steps", "1", "--seq-len", "16", "--batch-size", "2", "-q")
BENCH = ("--format", "bf16", "--compile", "off", "--min-iters", "1", "--min-time", "0", "--rounds", "1",
          "--launches", "1", "--seq", "16", "-q")  # fmt: skip
_NVFP4 = ("--format", "e2m1", "--granularity", "nvfp4", "--layout", "compressed-tensors")
FORMS: Mapping[str, Sequence[str]] = {
    "unit": ("--method", "unit", "--format", "fp16"),
    "rows": ("--method", "unit", "--format", "e4m3fn", "--granularity", "row"),
    "collage": ("--method", "collage"),
    "exact": ("--method", "collage", "--residual", "exact16"),
    "blocks": ("--method", "unit", "--format", "e4m3fn", "--granularity", "128x128"),
    "mx": ("--method", "scalify", "--format", "e2m1", "--granularity", "mx"),
    "groups": ("--format", "int4", "--granularity", "group:16", "--layout", "compressed-tensors"),
    "nvfp4": _NVFP4,
    "calibrated": (*_NVFP4, "--calibrate", "demo"),
    "points": ("--method", "multipoint", "--format", "int4", "--bits", "7"),
    "compressed": ("--format", "e4m3fn", "--layout", "compressed-tensors"),
    "entropy": ("--bits", "6"),
}
# Third-party layouts, by the names of their folders.
LAYOUTS = {layout.replace(" ", "-"): layout for layout in MAKERS}


def make_material(folder: Path) -> None:
    """Write a small valid file of every kind that lpconv reads into a folder."""
    make_llama(folder / "llama")
    make_llama(folder / "narrow", vocab_size=64)  # its tokenizer knows 272
    _bert(folder / "bert")
    sharded = transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
    sharded.save_pretrained(folder / "sharded", max_shard_size="30KB")
    shutil.copytree(folder / "llama", folder / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(sharded.state_dict(), folder / "pickled" / "pytorch_model.bin")
    for name, form in FORMS.items():
        _lpconv(folder, "convert", "llama", *form, "--verify", "weights", "-q", "-o", name)
    _unequal(folder / "compressed", folder / "unequal")
    _lpconv(folder, "init", "llama", "--reinit", "-q", "-o", "fresh")
    _lpconv(folder, "restore", "unit", "-o", "restored", "-q")
    _lpconv(folder, "probe", "llama", *PROBE, "--calibrate", "-o", "probe")
    _lpconv(folder, "finetune", "llama", "--recipe", "collage-bf16", *TUNE, "-o", "tuned")
    _interrupted(folder)
    _lpconv(folder, "bench", "llama", *BENCH, "--save", "bench.json")
    _lpconv(folder, "export", "onnx", "unit", "-o", "onnx", "-q")
    probe = {"id": "b", "kind": "probe", "model": "job:a", "steps": 1, "seq_len": 16, "batch_size": 2}
    jobs = [{"id": "a", "model": "llama", "verify": "weights"}, probe]
    (folder / "batch").mkdir()
    shutil.copytree(folder / "llama", folder / "batch" / "llama")
    (folder / "batch" / "jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    (folder / "batch" / "jobs.yaml").write_text(
        "version: 1\ndefaults: {verify: weights}\njobs:\n  - {id: a, model: llama, rules: ['model.embed*=keep']}\n"
        "  - id: b\n    model: llama\n    method: collage\n    gates: ['sqnr>=10']\n"
    )
    (folder / "batch" / "jobs.toml").write_text('version = 1\n[[jobs]]\nid = "a"\nmodel = "llama"\nformat = "e4m3fn"\n')
    _lpconv(folder / "batch", "batch", "jobs.json", "-q")
    _data(folder / "data")
    shallow_demo(folder / "wide")
    for name, layout in LAYOUTS.items():
        make_foreign(layout, folder / "wide", folder / name)
    rewrite_as_gguf(folder / "wide", folder / "gguf")


def _lpconv(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lpconv", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (arguments, done.stderr)


def make_llama(target: Path, vocab_size: int = 272) -> None:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    tiny("llama", target, num_hidden_layers=1, intermediate_size=48, vocab_size=vocab_size, **special)
    with_demo_tokenizer(target)


def _bert(target: Path) -> None:
    special = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*special.values(), *letters, *(f"##{c}" for c in letters)]
    raw = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=len(words),
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _unequal(sound: Path, target: Path) -> None:
    """Write a third-party checkpoint in which weights that readers fuse have different scales."""
    ours = shutil.ignore_patterns("lpconv.json", "SHA256SUMS", "report.*")
    shutil.copytree(sound, target, ignore=ours)
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.endswith("q_proj.weight_scale"):
            tensors[name] = tensors[name] * 2
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _interrupted(folder: Path) -> None:
    """Write a fine-tuning without its published model, and a conversion that stopped after its last shard."""
    tuning = ("finetune", "llama", "--recipe", "bf16", *TUNE, "--save-every", "1", "-o", "stopped")
    _stopped(folder, "lpconv.train.study", "publish_model", *tuning)
    assert list((folder / "stopped").rglob("checkpoint-*"))
    conversion = ("convert", "sharded", "--verify", "weights", "-q", "-o", "half")
    _stopped(folder, "lpconv.convert.run", "write_metadata", *conversion)
    assert (folder / "half.partial" / "journal.jsonl").read_text().count("\n") > 2


def _stopped(folder: Path, module: str, function: str, *arguments: str) -> None:
    """Run a command that ends when it calls a function."""
    code = (
        f"import os, sys, {module} as m\nfrom lpconv.cli.main import app\n"
        f"m.{function} = lambda *_: os._exit(9)\napp(sys.argv[1:])"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, check=False)


def _data(folder: Path) -> None:
    import datasets

    folder.mkdir()
    texts = [t for t in demo_text("heldout").read_text(encoding="utf-8").splitlines() if t][:200]
    rows = datasets.Dataset.from_dict({"text": texts, "label": [str(i % 3) for i in range(len(texts))]})
    (folder / "x.txt").write_text("\n".join(texts))
    rows.to_json(folder / "x.jsonl")
    rows.to_csv(folder / "x.csv")
    rows.to_parquet(folder / "x.parquet")
