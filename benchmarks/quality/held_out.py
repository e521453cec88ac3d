"""Held-out texts, and how far the predictions of a converted model are from those of its source on them."""

import json
import os
import pydoc_data.topics
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpconv
from lpconv.data import demo_text
from lpconv.models.tokenizer import read_tokenizer, tokenize

LENGTH, WINDOWS = 128, 16


def texts(folder: Path) -> dict[str, Path]:
    """A play that no model was calibrated on, and a text unlike plays: the help topics of Python."""
    topics = folder / "topics.txt"
    topics.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    return {"plays": demo_text("heldout"), "python": topics}


def windows_of(model: Path, paths: Mapping[str, Path], count: int | None = WINDOWS) -> dict[str, Tensor]:
    """The first windows of each text as token ids of the model, [count, LENGTH]."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = read_tokenizer(model)
    return {
        name: tokenize(path, tokenizer, seq_len=LENGTH, vocab_size=size).windows[:count] for name, path in paths.items()
    }


def predictions(path: Path, windows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Log-probabilities of a checkpoint in fp32 on each text, [tokens, vocabulary]."""
    model = lpconv.load(path, dtype=torch.float32)
    return {name: outputs_of(model, ids) for name, ids in windows.items()}


@torch.no_grad()
def outputs_of(model: Any, ids: Iterable[Tensor]) -> Tensor:
    """Log-probabilities on each window, [tokens, vocabulary]; the last states of a model without a head."""
    outputs = [model(input_ids=window[None]) for window in ids]
    return torch.cat([o.logits[0].log_softmax(-1) if "logits" in o else o.last_hidden_state[0] for o in outputs])


def kl_of(source: Tensor, other: Tensor) -> Tensor:
    """KL of the source to another prediction, for each token, in nats."""
    return (source.exp() * (source - other)).sum(-1).double()


def compare(source: Tensor, other: Tensor) -> dict[str, float]:
    """Mean KL of the source to another prediction, and the share of equal first choices."""
    same = (source.argmax(-1) == other.argmax(-1)).double()
    return {"kl": float(kl_of(source, other).mean()), "top1": float(same.mean())}


def compare_texts(source: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """`compare` for each text."""
    return {name: compare(source[name], other[name]) for name in source}


def converted(model: Path, output: Path, options: str) -> dict[str, float]:
    """Convert on one thread with `lpconv convert`, unless the output exists; returns seconds and peak memory."""
    if output.exists():
        return {}
    words = [*shlex.split(options), "--verify", "weights", "--workers", "1", "--resume", "-o", str(output)]
    command = [sys.executable, "-m", "lpconv", "convert", str(model), *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    report = json.loads((output / "report.json").read_text())
    return {"seconds": report["seconds"], "peak_bytes": report["peak_rss_bytes"]}
