"""What the processes of `test_processes` do."""

from pathlib import Path

import torch
import torch.distributed as dist

from lpconv.scaled import ScaledTensor, scaled_tensor
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import GradientAverage
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune

# What is trained, and how far the losses may be from those of one process. Sums in another order are rounded to fp32 in
# the first two; the others round gradients to 16 bits, on each process its own.
FP32, UNIT = {"recipe": "fp32"}, {"precision": "fp32", "method": "unit"}
CASES: dict[str, tuple[dict[str, str], float]] = {
    "fp32": (FP32, 2e-6),
    "unit": (UNIT, 2e-6),
    "adaptive": ({"recipe": "adaptive-fp16"}, 2e-3),
    "collage": ({"recipe": "collage-bf16"}, 5e-3),
}
# The model and the arithmetic of other families. Targets of "t5" have lengths of their own, so processes have more or
# fewer of them.
FAMILIES: dict[str, tuple[str, dict[str, str], str]] = {
    f"{kind} {parallel} {'unit' if how is UNIT else 'fp32'}": (kind, how, parallel)
    for kind in ("masked", "bert", "t5")
    for how, parallel in ((FP32, "ddp"), (FP32, "fsdp2"), (UNIT, "ddp"))
    if kind == "t5" or how is FP32
}


def options(case: str, *, is_alone: bool = False) -> FinetuneOptions:
    """Few and small steps. Two processes divide those of "t5" into two batches, which are computed twice."""
    settings: dict[str, object] = {"batch_size": 4}
    if case in FAMILIES:
        kind, how, parallel = FAMILIES[case]
        settings |= {"lr": 1e-2, "parallel": "ddp" if is_alone else parallel}
        if kind == "t5" and not is_alone:
            settings |= {"batch_size": 2, "grad_accum": 2, "eval_batches": 4, "gradient_checkpointing": True}
        settings |= {"data": f"models/{kind}.jsonl"} if kind in ("bert", "t5") else {}
    else:
        how = CASES[case][0]
    return FinetuneOptions(
        arithmetic=arithmetic(**how), steps=2, seq_len=32, eval_every=0, twin="none", save_every=0,
        clip=0.5, save="plain", **{"eval_batches": 2, **settings},  # type: ignore[arg-type]
    )  # fmt: skip


def model_of(case: str) -> str:
    """The model of a case; those of the families are below the current folder."""
    return f"models/{FAMILIES[case][0]}" if case in FAMILIES else "demo"


def averaged_gradients() -> list[tuple[torch.Tensor, float]]:
    """Gradients that differ between the two processes in value and scale, averaged: data and scale."""
    rank = dist.get_rank()
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([1.0, 3.0]) * (rank + 1)
    half = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    half.grad = torch.tensor([256.0 if rank else 1.0], dtype=torch.bfloat16)
    scaled, static = (torch.nn.Parameter(scaled_tensor(torch.zeros(2, dtype=torch.float16), 1.0)) for _ in range(2))
    data = torch.tensor([1.0, 2.0], dtype=torch.float16)
    scaled.grad = scaled_tensor(data, torch.tensor(2.0 ** (20 if rank else -20)))
    static.grad = scaled_tensor(data, 4.0 if rank else 1.0)
    parameters = [plain, half, scaled, static]
    GradientAverage(parameters).finish(parameters)
    return [_parts(p.grad) for p in parameters]


def _parts(gradient: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    assert gradient is not None
    if isinstance(gradient, ScaledTensor):
        return gradient.data_part, float(gradient.scale)
    return gradient, 1.0


def train_each() -> None:
    """Train each case into a folder of its name. The first one creates the process group, as under torchrun."""
    for case in (*CASES, *FAMILIES):
        finetune(model_of(case), Path(case), options(case))
    torch.save(averaged_gradients(), f"averaged{dist.get_rank()}.pt")
