"""Native unit scaling of unmodified architectures: sizes at initialisation, and training from scratch.

    python -m benchmarks.reproduce.native --out DIRECTORY [--seeds 3] [--only sizes|training|masked]

1. Sizes: the root mean square of the data of every linear layer's output, of the gradient that reaches it and of its
   weight's gradient, for BERT, GPT-2 and Llama of 12 layers and width 128, on random tokens; the share within [1/2, 2].
   Beside it the same models as transformers initialises them, unit-scaled with their function kept, and the decoder of
   the package unit-scaling.
2. Rates: the held-out loss of plain and native fp32 over learning rates, by the paper's rule and by u-μP's, one seed.
3. Training from scratch: fp32, native in fp32, fp16 and fp8 without a loss scale, plain fp8 and fp16 with none and with
   the best of a few constant ones.
4. The same of a BERT on masked bytes, for long enough to leave the entropy of single bytes behind.

The papers: Blake et al. 2023, arXiv 2303.11257; u-μP's rates: Blake et al. 2024, arXiv 2407.17465. Writes a folder for
each, and figure.png. `--quick` is for trying the script.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import unit_scaling as uu
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from benchmarks import common
from benchmarks.reproduce.byte_models import corpus
from benchmarks.reproduce.figures import panels, plot_training
from benchmarks.reproduce.miniature import (
    QUICK,
    Arm,
    Curve,
    Size,
    draw,
    observe,
    rms,
    save,
    start_model,
    train,
    training_table,
)
from benchmarks.reproduce.scaled_training import plain_fp8
from lpconv.scaled import AdamW, native, native_groups, scaled

WIDTH, LAYERS, VOCABULARY, HEADS, LENGTH = 128, 12, 512, 4, 64
WITHIN = (0.5, 2.0)
PLAIN_RATES = [2.0**e for e in (-9, -8, -7)]
UNIT_RATES = [2.0**e for e in (-7, -6, -5)]
LOSS_SCALES = (2.0**4, 2.0**8, 2.0**12)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model trained from scratch, its size, and the learning rates to try for native runs, by rule."""

    kind: str
    size: Size
    native_rates: Mapping[str, Sequence[float]]


TASKS = {
    "training": Task(
        kind="llama",
        size=Size(hidden=64, layers=2),
        native_rates={"unit": UNIT_RATES, "u-mup": [2.0**e for e in (-3, -2, -1)]},
    ),
    "masked": Task(
        kind="bert",
        size=Size(hidden=64, layers=2, batch=32, length=32, steps=3000, evaluate_every=500),
        native_rates={"unit": UNIT_RATES},
    ),
}


def architectures(attention: str) -> dict[str, Callable[[], nn.Module]]:
    """12 layers of each architecture, without dropout."""
    shared: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": attention}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, **shared}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = hf.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
                         attn_pdrop=0, bos_token_id=0, eos_token_id=0, **shared)  # fmt: skip
    return {
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(intermediate_size=4 * WIDTH, **sizes, **quiet)),
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=8 * WIDTH // 3 // 16 * 16, **sizes)),
    }


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of `count` tensors have a size within [1/2, 2], and the smallest and largest size."""

    model: str
    method: str
    what: str
    seed: int
    inside: float
    count: int
    least: float
    most: float


def observed(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
    """Sizes of the linear layers' outputs, gradients and weight gradients, for 8 rows of 64 random tokens."""
    sizes: dict[str, list[float]] = {"outputs": [], "gradients": [], "weight gradients": []}

    def on_output(_: nn.Module, __: Any, out: Tensor) -> None:
        sizes["outputs"].append(rms(out))
        out.register_hook(lambda grad: sizes["gradients"].append(rms(grad)))

    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_hook(on_output)
    loss(torch.randint(0, VOCABULARY, (8, LENGTH))).backward()
    sizes["weight gradients"] = [rms(p.grad) for p in model.parameters() if p.dim() == 2 and p.grad is not None]
    return sizes


def shares(name: str, method: str, seed: int, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> list[Share]:
    return [
        Share(model=name, method=method, what=what, seed=seed, count=len(sizes), least=min(sizes), most=max(sizes),
              inside=sum(WITHIN[0] <= s <= WITHIN[1] for s in sizes) / len(sizes))
        for what, sizes in observed(model, loss).items()
    ]  # fmt: skip


def own_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids).loss


def measure_sizes(seeds: int) -> list[Share]:
    measured: list[Share] = []
    for seed in range(seeds):
        for attention in ("sdpa", "eager"):
            for kind, build in architectures(attention).items():
                for method in ("unit", "native"):
                    torch.manual_seed(seed)
                    model = build()
                    model = native(model, seed=seed) if method == "native" else scaled(model, method="unit")
                    measured += shares(f"{kind}, {attention}", method, seed, model, own_loss(model))
        torch.manual_seed(seed)
        decoder = uu.TransformerDecoder(WIDTH, VOCABULARY, LAYERS, HEADS, 0.0)
        measured += shares("its own decoder", "unit-scaling package", seed, decoder, decoder.loss)
    return measured


def sizes_table(measured: list[Share]) -> str:
    kinds, rows = list(dict.fromkeys(s.what for s in measured)), []
    for model, method in dict.fromkeys((s.model, s.method) for s in measured):
        cells = []
        for what in kinds:
            here = [s for s in measured if (s.model, s.method, s.what) == (model, method, what)]
            inside = statistics.fmean(s.inside for s in here)
            least, most = min(s.least for s in here), max(s.most for s in here)
            cells.append(f"{inside:.0%} of {here[0].count} ({least:.2g} to {most:.2g})")
        rows.append((model, method, *cells))
    seeds = len({s.seed for s in measured})
    title = f"Share of tensors whose data has a size within [1/2, 2] (smallest to largest), {seeds} seeds"
    return f"{title}\n\n{common.markdown(('model', 'method', *kinds), rows)}"


def drawn(compute: str) -> Callable[[nn.Module], nn.Module]:
    """Native scaling with weights drawn from the seed of the latest `torch.manual_seed`."""
    return lambda model: native(model, seed=torch.initial_seed(), compute=compute)


def native_arm(name: str, compute: str, rule: str, rate: float) -> Arm:
    """A native run at this rate instead of the size's own; the rate is the step on Ŵ."""

    def optimizer(parameters: Any, *, lr: float, **options: Any) -> AdamW:
        return AdamW(native_groups(parameters, rate, rule=rule), **options)

    return Arm(name=name, prepare=drawn(compute), optimizer=optimizer, guarded=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run at one rate, with the sizes of data and gradients along the trained model."""

    lr: float
    curve: Curve
    sizes: dict[str, list[float]]

    @property
    def loss(self) -> float:
        return self.curve.held_out_loss[-1]


class Runs:
    """Runs by rule or arm, rate and seed, saved as they finish, so that an interrupted command can be resumed."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.done: dict[str, Run] = {}
        if path.exists():
            for key, run in common.load(path).items():
                self.done[key] = Run(lr=run["lr"], curve=Curve(**run["curve"]), sizes=run["sizes"])

    def get(self, arm: Arm, lr: float, seed: int, size: Size) -> Run:
        key = f"{arm.name}, rate {lr}, seed {seed}"
        if key not in self.done:
            curve, model = train(arm, self.kind, seed, replace(size, lr=lr))
            self.done[key] = Run(lr=lr, curve=curve, sizes=along(model, self.kind, size))
            common.save({k: asdict(r) for k, r in self.done.items()}, self.path)
        print(f"{key}: {self.done[key].loss:.4f}", file=sys.stderr, flush=True)
        return self.done[key]


def along(model: nn.Module, kind: str, size: Size) -> dict[str, list[float]]:
    """Sizes of the data of activations, from first to last, and of the gradients that reach them."""
    seen = observe(model, draw(kind, size))
    return {d: [v for (_, which), v in seen.items() if which == d] for d in ("activation", "gradient")}


def plain_fp16(model: nn.Module) -> nn.Module:
    """The model in fp16, with fp32 gradients at the parameters, where the loss scale is removed."""
    model = model.half()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


PLAIN = Arm(name="fp32", prepare=lambda m: m)
# Weights, activations and gradients in the format, plus fp32 copies of the weights.
PLAIN_LOW: dict[str, Callable[[nn.Module], nn.Module]] = {"fp8": plain_fp8, "fp16": plain_fp16}


def sweep(runs: Runs, task: Task, size: Size) -> dict[str, list[Run]]:
    """Runs of one seed at each learning rate, by rule."""
    by_rule = {"plain": [runs.get(PLAIN, lr, 0, size) for lr in PLAIN_RATES]}
    for rule, rates in task.native_rates.items():
        by_rule[rule] = [runs.get(native_arm(f"native fp32 ({rule})", "fp32", rule, lr), lr, 0, size) for lr in rates]
    return by_rule


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda r: r.loss)


def rates_table(kind: str, by_rule: dict[str, list[Run]]) -> str:
    rows = [(rule, *(f"2^{math.log2(r.lr):.0f}: {r.loss:.3f}" for r in runs)) for rule, runs in by_rule.items()]
    table = common.markdown(("rule", *3 * ["learning rate: loss"]), rows)
    return f"Held-out loss in fp32 over learning rates, {kind}, seed 0\n\n{table}"


def training(runs: Runs, size: Size, rates: dict[str, list[Run]]) -> list[Curve]:
    """Runs of every arm at the best rate of its rule, seed by seed."""
    plain = best(rates["plain"]).lr
    rule = min((r for r in rates if r != "plain"), key=lambda r: best(rates[r]).loss)
    own = best(rates[rule]).lr
    arms = [
        (PLAIN, plain),
        *((native_arm(f"native {c} ({rule})", c, rule, own), own) for c in ("fp32", "fp16", "fp8")),
    ]
    for compute, prepare in PLAIN_LOW.items():
        fixed = [
            Arm(name=f"plain {compute}, loss scale 2^{math.log2(s):.0f}", prepare=prepare,
                loss_scale=("constant", {"scale": s}))
            for s in LOSS_SCALES
        ]  # fmt: skip
        arms.append((Arm(name=f"plain {compute}, no loss scale", prepare=prepare), plain))
        arms.append((min(fixed, key=lambda arm: runs.get(arm, plain, 0, size).loss), plain))
    return [runs.get(arm, lr, seed, size).curve for seed in range(size.seeds) for arm, lr in arms]


def figure(fresh: dict[str, list[float]], trained: dict[str, list[float]], curves: list[Curve], path: Path) -> None:
    """Plot sizes along the graph, fresh and trained, and the training curves."""
    with panels(path, 2) as (left, right):
        for name, sizes, style in (("fresh", fresh, "-"), ("trained", trained, "--")):
            for direction, colour in (("activation", "C0"), ("gradient", "C1")):
                line = [math.log2(max(v, 2.0**-40)) for v in sizes[direction]]
                left.plot(line if direction == "activation" else line[::-1], style, color=colour,
                          label=f"{name}: {direction}s")  # fmt: skip
        left.axhspan(-1, 1, color="0.85")
        left.set(title="native Llama", xlabel="module, first to last", ylabel="log2 RMS of data (grey: 1/2 to 2)")
        plot_training(right, "llama", curves)


def train_task(task: Task, folder: Path, size: Size) -> tuple[dict[str, list[Run]], list[Curve]]:
    """Sweep the rates and run every arm, in a folder that keeps finished runs."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder / "runs.json", task.kind)
    rates = sweep(runs, task, size)
    curves = training(runs, size, rates)
    counts = torch.bincount(corpus("train")).double()
    entropy = float(torch.special.entr(counts / counts.sum()).sum())
    title = f"Training from scratch, {task.kind}, at the best rates (entropy of single bytes {entropy:.2f} nats)"
    tables = [rates_table(task.kind, rates), training_table(title, curves)]
    write(folder, asdict(size), {"runs": {k: asdict(r) for k, r in runs.done.items()}}, tables)
    return rates, curves


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("sizes", *TASKS))
    options = parser.parse_args()
    if options.only in (None, "sizes"):
        sizes = measure_sizes(options.seeds)
        write(options.out / "sizes", {"width": WIDTH, "layers": LAYERS}, {"sizes": [asdict(s) for s in sizes]},
              [sizes_table(sizes)])  # fmt: skip
    for name, task in TASKS.items():
        if options.only not in (None, name):
            continue
        size = replace(QUICK if options.quick else task.size, seeds=options.seeds)
        rates, curves = train_task(task, options.out / name, size)
        if name == "training":
            trained = best([r for rule in task.native_rates for r in rates[rule]])
            fresh = drawn("fp32")(start_model(task.kind, size, 0))
            figure(along(fresh, task.kind, size), trained.sizes, curves, options.out / "figure.png")


def write(folder: Path, settings: dict[str, Any], raw: dict[str, Any], tables: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, settings, raw, tables)


if __name__ == "__main__":
    main()
