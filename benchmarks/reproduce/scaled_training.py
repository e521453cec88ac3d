"""Byte-level language models trained from one start in many arithmetics, on real text.

    python benchmarks/reproduce/scaled_training.py [--model llama|bert] [--steps 500] [--seeds 0 1 2] [--out FILE.json]

Every run of a seed has the same initial weights, batches and hyper-parameters; only the arithmetic differs. The final
held-out loss is averaged over fixed batches, evaluated in the arithmetic of the run. Text: the sources of Python's
standard library, or the files given by --text; the last tenth is held out.
"""

import argparse
import copy
import json
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpconv.kernels.linear import linear
from lpconv.scaled import AdamW, StepGuard, fallbacks, scaled, scaling_of

aten = torch.ops.aten
GEMMS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


class Fp16ThroughFp32(TorchDispatchMode):
    """fp16 matrix products computed in fp32 and rounded once, as a GPU does; a CPU's own are 50 times slower."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GEMMS and args[0].dtype == torch.float16 and args[0].device.type == "cpu":
            return func(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs).half()
        return func(*args, **kwargs)


class PlainFp8Linear(nn.Linear):
    """A linear layer whose operands and gradients are cast to fp8 as they are: no scale of any kind."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def plain_fp8(model: nn.Module) -> nn.Module:
    """`model` in bf16 with every linear layer but the output head in fp8: what scales must improve on."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of transformers models
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = PlainFp8Linear
    return model.bfloat16()


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one arithmetic prepares a model and its optimizer."""

    prepare: Callable[[nn.Module], nn.Module]
    state_dtype: torch.dtype = torch.float32
    guarded: bool = False


RUNS: dict[str, Run] = {
    "fp32": Run(prepare=lambda m: m),
    "plain fp16": Run(prepare=lambda m: m.half()),
    "plain fp8": Run(prepare=plain_fp8),
    "unit fp16": Run(prepare=lambda m: scaled(m, method="unit", compute="fp16")),
    "unit fp8": Run(prepare=lambda m: scaled(m, method="unit", compute="fp8")),
    "scalify fp16, fp16 state": Run(
        prepare=lambda m: scaled(m, method="scalify", compute="fp16", rescale=("layernorm_grad", "weight_grad")),
        state_dtype=torch.float16,
    ),
    "scalify fp8, fp16 state": Run(
        prepare=lambda m: scaled(m, method="scalify", compute="fp8", rescale=("layernorm_grad", "weight_grad")),
        state_dtype=torch.float16,
    ),
    "adaptive fp16": Run(prepare=lambda m: scaled(m, method="adaptive", compute="fp16"), guarded=True),
}


def corpus(paths: list[Path]) -> Tensor:
    """The bytes of all files, in sorted order."""
    if not paths:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(p.read_bytes() for p in paths)), dtype=torch.long)


def build(name: str, hidden: int, layers: int, length: int) -> nn.Module:
    heads = max(1, hidden // 32)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=257, intermediate_size=8 * hidden // 3 // 16 * 16,
                                max_position_embeddings=length, attn_implementation="eager", **sizes)  # fmt: skip
        return hf.LlamaForCausalLM(config)
    config = hf.BertConfig(vocab_size=257, intermediate_size=4 * hidden, max_position_embeddings=length,
                           hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation="eager",
                           **sizes)  # fmt: skip
    return hf.BertForMaskedLM(config)


def batch_of(text: Tensor, name: str, options: argparse.Namespace, generator: torch.Generator) -> dict[str, Tensor]:
    """Random windows; for BERT 15 % of the bytes are masked (token 256) and predicted."""
    starts = torch.randint(0, len(text) - options.length, (options.batch,), generator=generator)
    ids = torch.stack([text[s : s + options.length] for s in starts.tolist()])
    if name == "llama":
        return {"input_ids": ids, "labels": ids}
    masked = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(masked, 256), "labels": ids.masked_fill(~masked, -100)}


@torch.no_grad()
def held_out(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    model.eval()
    losses = [float(model(**b).loss) for b in batches]
    model.train()
    return sum(losses) / len(losses)


def train(key: str, start: nn.Module, text: Tensor, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run; the learning rate warms up over a tenth of the steps and then decays to zero by a cosine."""
    run, began = RUNS[key], time.perf_counter()
    model = run.prepare(copy.deepcopy(start)).train()
    optimizer = AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, state_dtype=run.state_dtype
    )
    schedule = hf.get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    guard = StepGuard(model) if run.guarded else None
    split = len(text) * 9 // 10
    batches = torch.Generator().manual_seed(seed)
    evaluation = torch.Generator().manual_seed(10_000)
    held = [batch_of(text[split:], options.model, options, evaluation) for _ in range(options.eval_batches)]
    curve = []
    with Fp16ThroughFp32():
        for step in range(options.steps):
            optimizer.zero_grad()
            loss = model(**batch_of(text[:split], options.model, options, batches)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if guard is None:
                optimizer.step()
            else:
                guard.step(optimizer)
            schedule.step()
            if step % 50 == 0 or step == options.steps - 1:
                curve.append((step, round(loss.item(), 4)))
        final = held_out(model, held)
    notes = {} if scaling_of(model) is None else fallbacks(model)
    skipped = 0 if guard is None else guard.num_skipped
    return {"run": key, "seed": seed, "held_out": final, "curve": curve, "counts": notes, "skipped": skipped,
            "time_s": time.perf_counter() - began}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "bert"], default="llama")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = corpus(options.text)
    results = []
    for seed in options.seeds:
        torch.manual_seed(seed)
        start = build(options.model, options.hidden, options.layers, options.length)
        for key in options.runs:
            results.append(train(key, start, text, seed, options))
            print(f"{key:28s} seed {seed}  {results[-1]['held_out']:.4f}", file=sys.stderr)
    summary = {}
    for key in options.runs:
        losses = [r["held_out"] for r in results if r["run"] == key]
        summary[key] = {"mean": statistics.mean(losses), "std": statistics.stdev(losses) if len(losses) > 1 else 0.0}
    versions = {"torch": torch.__version__, "transformers": hf.__version__, "python": platform.python_version()}
    report = {"command": " ".join(sys.argv), "versions": versions, "summary": summary, "runs": results}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: report[k] for k in ("command", "versions", "summary")}, indent=1))


if __name__ == "__main__":
    main()
