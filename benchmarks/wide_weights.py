"""What 8 bits cost in the weights that a conversion leaves in 16: routers, and the states of state space models.

    python -m benchmarks.wide_weights --work DIRECTORY --out benchmarks/results/wide-weights.json

Small models of three architectures learn the plays byte by byte (`--steps`); then some weights of each are converted
alone to e4m3fn with a scale for the tensor, every other one kept: by kind, and all matrices besides. Figures are over
held-out windows: KL of the source to the result in nats per byte, and of all choices of experts (a layer, a byte) the
share in which another set is chosen. `share` is how much of the model's numbers a kind is.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import lpconv
from lpconv.convert.options import ConvertOptions
from lpconv.convert.patterns import FormatRule, matches
from lpconv.convert.run import convert
from lpconv.data import demo_text
from lpconv.forms.reader import StoredTensors

_COMMON = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        {**_COMMON, **_EXPERTS, "shared_expert_intermediate_size": 96, "head_dim": 32, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
}  # fmt: skip
KINDS = {
    "router": r"re:\.gate\.weight$",
    "gate of the shared expert": r"re:\.shared_expert_gate\.",
    "A_log": r"re:\.A_log$",
    "depthwise filters": r"re:\.conv1d\.weight$",
    "dt_proj": r"re:\.dt_proj\.weight$",
    "in_proj_ba": r"re:\.in_proj_ba\.weight$",
    "x_proj": r"re:\.x_proj\.weight$",
    "all other matrices": r"re:\.(experts|self_attn|shared_expert|in_proj|in_proj_qkvz|out_proj|mlp)\..*weight$",
}
LENGTH, BATCH, WINDOWS = 32, 16, 64


def windows_of(split: str) -> Tensor:
    """Windows of bytes, [windows, LENGTH]."""
    data = torch.frombuffer(bytearray(demo_text(split).read_bytes()), dtype=torch.uint8).long()
    return data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(name: str, steps: int, work: Path) -> Path:
    """The directory of a model that has learnt the plays."""
    path = work / name
    if path.exists():
        return path
    cls, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**settings))
    optimizer, windows = torch.optim.AdamW(model.parameters(), lr=2e-3), windows_of("train")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        ids = windows[torch.randint(len(windows), (BATCH,))]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(name, step, round(loss.item(), 3), round(time.process_time()), flush=True)
    model.save_pretrained(path)
    return path


@contextmanager
def choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """The experts that routers choose while this lasts, one tensor of ids for each call of each of them, [bytes, k]."""
    seen: list[Tensor] = []
    routers = [m for n, m in model.named_modules() if n.endswith(".gate") and hasattr(m, "top_k")]
    hooks = [m.register_forward_hook(lambda *a: seen.append(a[2][-1].sort(-1).values)) for m in routers]
    yield seen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def said(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log probabilities, and the choices of experts."""
    with choices(model) as chosen:
        return model(input_ids=ids).logits.log_softmax(-1), chosen


def figures(source: nn.Module, other: nn.Module, ids: Tensor) -> dict[str, float]:
    (p, mine), (q, theirs) = said(source, ids), said(other, ids)
    found = {"kl": float((p.exp() * (p - q)).sum(-1).mean())}
    if mine:
        changed = [(a != b).any(-1).float() for a, b in zip(mine, theirs, strict=True)]
        found["other_experts"] = float(torch.cat(changed).mean())
    return found


def measured(name: str, path: Path, work: Path) -> dict[str, Any]:
    ids = windows_of("heldout")[:WINDOWS]
    source = lpconv.load(path, dtype=torch.float32)
    with StoredTensors.open(path) as stored:
        sizes = {n: form.num_elements for n, form in stored.forms.items()}
    with torch.no_grad():
        loss = float(source(input_ids=ids, labels=ids).loss)
    rows: dict[str, Any] = {}
    for i, (kind, pattern) in enumerate(KINDS.items()):
        named = [n for n in sizes if matches(pattern, n) and n not in rows]
        if not named:
            continue
        out = work / f"{name}-{i}"
        rules = (FormatRule(pattern=pattern, format="e4m3fn"), FormatRule(pattern="*", format="keep"))
        convert(str(path), out, ConvertOptions(format="e4m3fn", rules=rules, verify="none", force=True))
        share = sum(sizes[n] for n in named) / sum(sizes.values())
        rows[kind] = {"tensors": len(named), "share": share, **figures(source, lpconv.load(out), ids)}
        print(name, kind, rows[kind], flush=True)
    return {"loss": loss, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    asked, found = parser.parse_args(), {}
    asked.work.mkdir(parents=True, exist_ok=True)
    for name in asked.models:
        found[name] = {"steps": asked.steps, **measured(name, trained(name, asked.steps, asked.work), asked.work)}
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
