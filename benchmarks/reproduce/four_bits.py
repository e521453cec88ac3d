"""Training in four bits, and the share of each ingredient, on a small Llama that learns bytes from scratch.

    python -m benchmarks.reproduce.four_bits --out FILE.json [--seeds 3] [--table]

Llama of 2 layers and width 64, 200 steps of 8 windows of 64 bytes. Every run of a seed has the same start and batches;
its held-out loss is taken in its own arithmetic, and its trained weights are evaluated in fp32 as well. What is not an
operand of a linear layer stays in fp32. The first table has the recipes without scaled tensors against fp32, `nvfp4`
and `quartet2` with one ingredient changed, and native unit scaling with several kinds of operand scale against native
fp32. The second has the noise and the bias of gradients in recipes of four bits, on the way of a run in fp32
(`lpconv.probe.gradient_noise`). Runs are saved as they end, and the same command resumes.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import common
from benchmarks.reproduce.byte_models import batch_of, build, corpus, evaluate
from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES, LinearRecipe, use_recipe
from lpconv.probe.noise import NOISE_RECIPES, gradient_noise
from lpconv.scaled import AdamW, native, native_groups, unscaled_state_dict
from lpconv.scaled.places import heads
from lpconv.student import estimate_mean

STEPS, BATCH, LENGTH, HIDDEN, LAYERS = 200, 8, 64, 64, 2
NOISE_STEPS = (0, 10, 50, 100, 200)
PLAIN_RATE, NATIVE_RATE = 2.0**-8, 2.0**-5  # best rates of benchmarks.reproduce.native

_NVFP4 = FP4_RECIPES["nvfp4"]
_ALONG = replace(_NVFP4.weight, square=False)
_NEAREST = replace(_NVFP4.gradient, rounding="nearest")
_QUARTET = FP4_RECIPES["ms-eden"]
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
    "quartet2": _QUARTET,
    "quartet2, one scale in the forward pass": replace(_QUARTET, input=_ALONG, weight=_ALONG),
    "quartet2, gradients as in nvfp4": replace(_QUARTET, gradient=_NVFP4.gradient, rotates_grad_weight=True),
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
    """Final held-out losses in nats per byte, in the run's own arithmetic and with its weights in fp32."""

    arm: str
    seed: int
    loss: float
    loss_fp32: float
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Norm of the gradient relative to its noise and its bias in a recipe, after some steps in fp32."""

    recipe: str
    seed: int
    step: int
    over_noise: float
    over_bias: float


def prepared(arm: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of an arm and its optimizer."""
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
    began = time.perf_counter()
    for _ in steps(model, optimizer, seed):
        pass
    fixed = torch.Generator().manual_seed(10_000)
    held_out = [batch_of("llama", corpus("heldout"), 16, LENGTH, fixed) for _ in range(8)]
    loss = evaluate(model, held_out)
    took = round(time.perf_counter() - began, 1)
    return Run(arm=arm, seed=seed, loss=loss, loss_fp32=evaluate(in_fp32(arm, model, optimizer), held_out), time_s=took)


def measure_noise(seed: int) -> Iterator[Noise]:
    """Noise and bias along a run in fp32, from one batch of 64 windows."""
    model, optimizer = prepared("fp32", seed)
    batch = batch_of("llama", corpus("train"), 64, LENGTH, torch.Generator().manual_seed(1000 + seed))
    recipes = {name: NOISE_RECIPES[name] for name in ("nvfp4", "quartet2", "mxfp4")}
    for step in steps(model, optimizer, seed):
        if step in NOISE_STEPS:
            for estimate in gradient_noise(model, [batch], recipes=recipes, seed=seed):
                yield Noise(
                    recipe=estimate.name,
                    seed=seed,
                    step=step,
                    over_noise=estimate.ratio,
                    over_bias=estimate.gradient / estimate.bias,
                )


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Iterator[int]:
    """Train, and yield the number of finished steps before each step and after the last one."""
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    text, generator = corpus("train"), torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        yield step
        optimizer.zero_grad()
        model(**batch_of("llama", text, BATCH, LENGTH, generator)).loss.float().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    yield STEPS


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
    """The fp32 values of a parameter: the optimizer's copy, if there is one."""
    parameter: Any = model.get_parameter(name)
    copy = optimizer.state[parameter].get("master")
    return stored if copy is None else copy * parameter.scale


def gap(runs: Mapping[tuple[str, int], Run], arm: str, base: str, key: str) -> str:
    """Mean difference to the base over seeds, with its 95 % interval (Student's t)."""
    pairs = [(r, runs[base, seed]) for (name, seed), r in runs.items() if name == arm and (base, seed) in runs]
    estimate = estimate_mean([getattr(r, key) - getattr(b, key) for r, b in pairs])
    half = f" ± {estimate.high - estimate.value:.3f}" if len(pairs) > 1 else ""
    return f"{estimate.value:+.3f}{half}"


def table(runs: Sequence[Run]) -> str:
    """One row per finished arm, with gaps to fp32 of the same family."""
    by_arm = {(r.arm, r.seed): r for r in runs}
    rows = []
    for arm in (*PLAIN, *NATIVE):
        base = "native fp32" if arm in NATIVE else "fp32"
        losses = [r.loss for (name, _), r in by_arm.items() if name == arm]
        if losses:
            gaps = ["", ""] if arm == base else [gap(by_arm, arm, base, key) for key in ("loss", "loss_fp32")]
            rows.append((arm, str(len(losses)), f"{statistics.fmean(losses):.3f}", *gaps))
    head = ("run", "seeds", "held-out loss", "over fp32, own arithmetic", "over fp32, weights in fp32")
    return common.markdown(head, rows)


def noise_table(measured: Sequence[Noise]) -> str:
    """Gradient over noise and over bias after the steps in `NOISE_STEPS`, per recipe, averaged over seeds."""
    rows = []
    for recipe, kind in itertools.product(dict.fromkeys(n.recipe for n in measured), ("noise", "bias")):
        of_recipe = [n for n in measured if n.recipe == recipe]
        means = (statistics.fmean(getattr(n, f"over_{kind}") for n in of_recipe if n.step == s) for s in NOISE_STEPS)
        rows.append((recipe, f"gradient / {kind}", *(f"{x:.1f}" for x in means)))
    return common.markdown(("recipe", "", *(f"step {s}" for s in NOISE_STEPS)), rows)


def recorded_runs() -> list[Run]:
    return [Run(**r) for r in common.recorded("four-bits/results")["runs"]]


def recorded_noise() -> list[Noise]:
    return [Noise(**n) for n in common.recorded("four-bits/results")["noise"]]


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--table", action="store_true", help="only print the tables of the existing runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = common.load(options.out) if options.out.exists() else {}
    runs = [Run(**r) for r in known.get("runs", [])]
    noise = [Noise(**n) for n in known.get("noise", [])]
    done = {(r.arm, r.seed) for r in runs}
    arms: Sequence[str] = () if options.table else options.arms or (*PLAIN, *NATIVE)
    for seed in range(options.seeds):
        for arm in arms:
            if (arm, seed) in done:
                continue
            runs.append(train(arm, seed))
            print(runs[-1], file=sys.stderr, flush=True)
            save(options.out, runs, noise)
        if not options.table and seed not in {n.seed for n in noise}:
            noise += measure_noise(seed)
            save(options.out, runs, noise)
    print(table(runs), noise_table(noise), sep="\n")


def save(path: Any, runs: Sequence[Run], noise: Sequence[Noise]) -> None:
    """Write the result so far."""
    settings = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "hidden": HIDDEN, "layers": LAYERS,
                "plain_rate": PLAIN_RATE, "native_rate": NATIVE_RATE}  # fmt: skip
    head = {"command": common.command(), "machine": common.machine(), "settings": settings}
    common.save({**head, "runs": [r.__dict__ for r in runs], "noise": [n.__dict__ for n in noise]}, path)


if __name__ == "__main__":
    main()
