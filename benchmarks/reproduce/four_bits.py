"""Training in four bits, and the share of each ingredient, on a small Llama that learns bytes from scratch.

    python -m benchmarks.reproduce.four_bits --out FILE.json [--seeds 3] [--table]

Llama of 2 layers and width 64, 200 steps of 8 windows of 64 bytes. Every run of a seed has the same start and batches;
its held-out loss is taken in its own arithmetic, and its trained weights are evaluated in fp32 as well. What is not an
operand of a linear layer stays in fp32. Three tables:
the recipes without scaled tensors against fp32, `nvfp4` with one ingredient changed, and native unit scaling
with several kinds of operand scale against native fp32. Runs are saved as they end: the same command goes on where an
earlier one stopped.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import common
from benchmarks.reproduce.byte_models import batch_of, build, corpus, evaluate
from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES, LinearRecipe, use_recipe
from lpconv.scaled import AdamW, native, native_groups, unscaled_state_dict
from lpconv.scaled.places import heads
from lpconv.student import estimate_mean

STEPS, BATCH, LENGTH, HIDDEN, LAYERS = 200, 8, 64, 64, 2
PLAIN_RATE, NATIVE_RATE = 2.0**-8, 2.0**-5  # of the recorded sweep of benchmarks.reproduce.native

_NVFP4 = FP4_RECIPES["nvfp4"]
_ALONG = replace(_NVFP4.weight, square=False)
_NEAREST = replace(_NVFP4.gradient, rounding="nearest")
PLAIN: dict[str, LinearRecipe | None] = {
    "fp32": None,
    "mxfp8": FP8_RECIPES["mx"],
    "nvfp4": _NVFP4,
    "mxfp4": FP4_RECIPES["mx"],
    "nvfp4, not rotated": replace(_NVFP4, rotates_grad_weight=False),
    "nvfp4, weights in 1x16": replace(_NVFP4, weight=_ALONG),
    "nvfp4, gradients to nearest": replace(_NVFP4, gradient=_NEAREST),
    "nvfp4, none of the three": replace(_NVFP4, weight=_ALONG, gradient=_NEAREST, rotates_grad_weight=False),
    "nvfp4, last of 2 blocks wide": replace(_NVFP4, wide_share=0.5),
}
NATIVE: dict[str, dict[str, str]] = {
    "native fp32": {"compute": "fp32"},
    "native fp8, static": {"compute": "fp8", "operand_scale": "static"},
    "native mxfp8": {"compute": "fp8", "operand_scale": "mx"},
    "native nvfp4": {"compute": "fp4", "operand_scale": "nvfp4"},
    "native nvfp4, static scale of the tensor": {"compute": "fp4", "operand_scale": "nvfp4-static"},
    "native mxfp4": {"compute": "fp4", "operand_scale": "mx"},
    "native e2m1, a scale per row": {"compute": "fp4", "operand_scale": "row"},
    "native e2m1, static": {"compute": "fp4", "operand_scale": "static"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Held-out losses at the end, in nats per byte: in the run's own arithmetic, and of its weights in fp32."""

    arm: str
    seed: int
    loss: float
    loss_fp32: float
    time_s: float


def prepared(arm: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of an arm, and its optimizer."""
    torch.manual_seed(seed)
    model = build("llama", HIDDEN, LAYERS, LENGTH)
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    if arm in NATIVE:
        native(model, seed=seed, carrier=torch.float32, **NATIVE[arm])
        return model, AdamW(native_groups(model.parameters(), NATIVE_RATE, rule="unit"), **settings)
    recipe = PLAIN[arm]
    if recipe is not None:
        use_recipe(model, recipe, keep=heads(model))
    return model, torch.optim.AdamW(model.parameters(), lr=PLAIN_RATE, **settings)


def train(arm: str, seed: int) -> Run:
    """One run; the learning rate warms up over a tenth of the steps and then decays to zero by a cosine."""
    model, optimizer = prepared(arm, seed)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    text, generator = corpus("train"), torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch_of("llama", text, BATCH, LENGTH, generator)).loss.float().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    fixed = torch.Generator().manual_seed(10_000)
    held_out = [batch_of("llama", corpus("heldout"), 16, LENGTH, fixed) for _ in range(8)]
    loss = evaluate(model, held_out)
    took = round(time.perf_counter() - began, 1)
    return Run(arm=arm, seed=seed, loss=loss, loss_fp32=evaluate(in_fp32(arm, model, optimizer), held_out), time_s=took)


def in_fp32(arm: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """A model with the trained weights that multiplies in fp32; a native one keeps its rules."""
    exact = build("llama", HIDDEN, LAYERS, LENGTH)
    if arm not in NATIVE:
        exact.load_state_dict(model.state_dict())
        return exact
    native(exact, seed=0, compute="fp32")
    kept = unscaled_state_dict(model)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            own: Any = parameter
            own.data_part.copy_(master(model, optimizer, name, kept[name]) / own.scale)
    return exact


def master(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, stored: Tensor) -> Tensor:
    """The fp32 values of a parameter: the optimizer's copy if there is one."""
    parameter: Any = model.get_parameter(name)
    copy = optimizer.state[parameter].get("master")
    return stored if copy is None else copy * parameter.scale


def gap(runs: Mapping[tuple[str, int], Run], arm: str, base: str, key: str) -> str:
    """Mean over seeds of the difference to the base, with its 95 % interval (Student's t)."""
    pairs = [(r, runs[base, seed]) for (name, seed), r in runs.items() if name == arm and (base, seed) in runs]
    found = estimate_mean([getattr(r, key) - getattr(b, key) for r, b in pairs])
    half = f" ± {found.high - found.value:.3f}" if len(pairs) > 1 else ""
    return f"{found.value:+.3f}{half}"


def table(runs: Sequence[Run]) -> str:
    """A row for each arm that has run, gaps over fp32 of the same family."""
    by_arm = {(r.arm, r.seed): r for r in runs}
    lines = [
        "| run | seeds | held-out loss | over fp32, own arithmetic | over fp32, weights in fp32 |",
        "|---" * 5 + "|",
    ]
    for arm in (*PLAIN, *NATIVE):
        base = "native fp32" if arm in NATIVE else "fp32"
        losses = [r.loss for (name, _), r in by_arm.items() if name == arm]
        if losses:
            gaps = ["", ""] if arm == base else [gap(by_arm, arm, base, key) for key in ("loss", "loss_fp32")]
            lines.append(f"| {arm} | {len(losses)} | {statistics.fmean(losses):.3f} | {gaps[0]} | {gaps[1]} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", help="these only")
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [Run(**r) for r in common.load(options.out)["runs"]] if options.out.exists() else []
    done = {(r.arm, r.seed) for r in runs}
    arms: Sequence[str] = () if options.table else options.arms or (*PLAIN, *NATIVE)
    for seed in range(options.seeds):
        for arm in arms:
            if (arm, seed) in done:
                continue
            runs.append(train(arm, seed))
            print(runs[-1], file=sys.stderr, flush=True)
            save(options.out, runs)
    print(table(runs))


def save(path: Any, runs: Sequence[Run]) -> None:
    """Write what there is so far."""
    settings = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "hidden": HIDDEN, "layers": LAYERS,
                "plain_rate": PLAIN_RATE, "native_rate": NATIVE_RATE}  # fmt: skip
    head = {"command": common.command(), "machine": common.machine(), "settings": settings}
    common.save({**head, "runs": [r.__dict__ for r in runs]}, path)


if __name__ == "__main__":
    main()
