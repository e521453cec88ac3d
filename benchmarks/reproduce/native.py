"""Native unit scaling of unmodified architectures: sizes at initialisation, and training from scratch.

    python benchmarks/reproduce/native.py --out benchmarks/results/native [--seeds 3] [--only sizes|training]

1. Sizes: the root mean square of the data of every linear layer's output, of the gradient that reaches it and of its
   weight's gradient, for BERT, GPT-2 and Llama of 12 layers and width 128, on random tokens; the share within [1/2, 2].
   Beside it the same models as transformers initialises them, unit-scaled with their function kept, and the decoder of
   the package unit-scaling.
2. Rates: the held-out loss of plain and native fp32 over learning rates, by the paper's rule and by u-μP's, one seed.
3. Training from scratch: fp32, native in fp32, fp16 and fp8 without a loss scale, plain fp8 with none and with the
   best of three constant ones.

The papers: Blake et al. 2023, arXiv 2303.11257; u-μP's rates: Blake et al. 2024, arXiv 2407.17465. Writes a folder for
sizes and one for training, and figure.png. `--quick` is for trying the script.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import unit_scaling as uu
from figures import panels, plot_training
from miniature import (
    FULL,
    QUICK,
    Arm,
    Curve,
    Size,
    draw,
    observe,
    save,
    start_model,
    train,
    train_all,
    training_table,
)
from scaled_training import plain_fp8
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpconv.scaled import AdamW, ScaledTensor, native, native_groups, scaled

WIDTH, LAYERS, VOCABULARY, HEADS, LENGTH = 128, 12, 512, 4, 64
WITHIN = (0.5, 2.0)
PLAIN_RATES = [2.0**e for e in range(-10, -4)]
NATIVE_RATES = {"unit": [2.0**e for e in range(-8, -2)], "u-mup": [2.0**e for e in range(-4, 2)]}
LOSS_SCALES = (2.0**4, 2.0**8, 2.0**12)


def architectures(attention: str) -> dict[str, Callable[[], nn.Module]]:
    """12 layers of each architecture, without dropout."""
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": attention}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, **common}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = hf.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
                         attn_pdrop=0, bos_token_id=0, eos_token_id=0, **common)  # fmt: skip
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


def _size(x: Any) -> float:
    data = x.data_part if isinstance(x, ScaledTensor) else x
    return float(data.detach().double().square().mean().sqrt())


def observed(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
    """Sizes of outputs, gradients and weight gradients of the linear layers, for 8 rows of 64 random tokens."""
    sizes: dict[str, list[float]] = {"outputs": [], "gradients": [], "weight gradients": []}

    def on_output(_: nn.Module, __: Any, out: Tensor) -> None:
        sizes["outputs"].append(_size(out))
        out.register_hook(lambda grad: sizes["gradients"].append(_size(grad)))

    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_hook(on_output)
    loss(torch.randint(0, VOCABULARY, (8, LENGTH))).backward()
    sizes["weight gradients"] = [_size(p.grad) for p in model.parameters() if p.dim() == 2 and p.grad is not None]
    return sizes


def shares(name: str, method: str, seed: int, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> list[Share]:
    return [
        Share(model=name, method=method, what=what, seed=seed, count=len(found), least=min(found), most=max(found),
              inside=sum(WITHIN[0] <= s <= WITHIN[1] for s in found) / len(found))
        for what, found in observed(model, loss).items()
    ]  # fmt: skip


def own_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids).loss


def measure_sizes(seeds: int) -> list[Share]:
    found: list[Share] = []
    for seed in range(seeds):
        for attention in ("sdpa", "eager"):
            for kind, build in architectures(attention).items():
                for method in ("unit", "native"):
                    torch.manual_seed(seed)
                    model = build()
                    model = native(model, seed=seed) if method == "native" else scaled(model, method="unit")
                    found += shares(f"{kind}, {attention}", method, seed, model, own_loss(model))
        torch.manual_seed(seed)
        decoder = uu.TransformerDecoder(WIDTH, VOCABULARY, LAYERS, HEADS, 0.0)
        found += shares("its own decoder", "unit-scaling package", seed, decoder, decoder.loss)
    return found


def sizes_table(found: list[Share]) -> str:
    lines = ["| model | method | " + " | ".join(dict.fromkeys(s.what for s in found)) + " |", "|---|---|---|---|---|"]
    for model, method in dict.fromkeys((s.model, s.method) for s in found):
        cells = []
        for what in dict.fromkeys(s.what for s in found):
            here = [s for s in found if (s.model, s.method, s.what) == (model, method, what)]
            inside, least, most = (
                statistics.fmean(s.inside for s in here),
                min(s.least for s in here),
                max(s.most for s in here),
            )
            cells.append(f"{inside:.0%} of {here[0].count} ({least:.2g} to {most:.2g})")
        lines.append(f"| {model} | {method} | " + " | ".join(cells) + " |")
    seeds = len({s.seed for s in found})
    title = f"Share of tensors whose data has a size within [1/2, 2] (smallest to largest), {seeds} seeds"
    return "\n".join([title, "", *lines, ""])


def drawn(compute: str) -> Callable[[nn.Module], nn.Module]:
    """Native scaling of a model that was built after `torch.manual_seed`: its weights follow the same seed."""
    return lambda model: native(model, seed=torch.initial_seed(), compute=compute)


def native_arm(name: str, compute: str, rule: str, rate: float) -> Arm:
    """A native run whose rate is the step on Ŵ, in place of the size's own."""

    def optimizer(parameters: Any, *, lr: float, **options: Any) -> AdamW:
        return AdamW(native_groups(parameters, rate, rule=rule), **options)

    return Arm(name=name, prepare=drawn(compute), optimizer=optimizer, guarded=True)


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A run of the sweep: whose rule, at which rate, and where it ended."""

    rule: str
    lr: float
    held_out_loss: float


def sweep(size: Size) -> list[Rated]:
    """One seed at each learning rate."""
    plain = Arm(name="fp32", prepare=lambda m: m)
    runs = [("plain", lr, plain, replace(size, lr=lr)) for lr in PLAIN_RATES]
    runs += [
        (f"native, {rule}", lr, native_arm("native", "fp32", rule, lr), size)
        for rule, rates in NATIVE_RATES.items()
        for lr in rates
    ]
    found = []
    for rule, lr, arm, at in runs:
        curve, _ = train(arm, "llama", 0, at)
        found.append(Rated(rule=rule, lr=lr, held_out_loss=curve.held_out_loss[-1]))
        print(found[-1], flush=True)
    return found


def best(found: list[Rated], start: str) -> Rated:
    return min((r for r in found if r.rule.startswith(start)), key=lambda r: r.held_out_loss)


def rates_table(found: list[Rated]) -> str:
    lines = ["| rule |" + 6 * " learning rate: loss |", "|---" * 7 + "|"]
    for rule in dict.fromkeys(r.rule for r in found):
        cells = (f"2^{math.log2(r.lr):.0f}: {r.held_out_loss:.3f}" for r in found if r.rule == rule)
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(["Held-out loss in fp32 over learning rates, Llama, seed 0", "", *lines, ""])


def training(size: Size, rates: list[Rated]) -> tuple[list[Curve], nn.Module]:
    """Every arm at the best rate of its rule; the model that native fp32 of the last seed ends at."""
    at, own = replace(size, lr=best(rates, "plain").lr), best(rates, "native")
    rule = own.rule.removeprefix("native, ")
    fixed = [
        Arm(
            name=f"plain fp8, loss scale 2^{math.log2(s):.0f}", prepare=plain_fp8, loss_scale=("constant", {"scale": s})
        )
        for s in LOSS_SCALES
    ]
    tried = [(train(arm, "llama", 0, at)[0].held_out_loss[-1], arm) for arm in fixed]
    print([(arm.name, loss) for loss, arm in tried], flush=True)
    arms = [
        Arm(name="fp32", prepare=lambda m: m),
        *(native_arm(f"native {c}", c, rule, own.lr) for c in ("fp32", "fp16", "fp8")),
        Arm(name="plain fp8, no loss scale", prepare=plain_fp8),
        min(tried, key=lambda t: t[0])[1],
    ]
    curves, trained = [], start_model("llama", size, 0)
    for curve, model in train_all(arms, "llama", at):
        curves.append(curve)
        trained = model if curve.arm == "native fp32" else trained
    return curves, trained


def figure(before: nn.Module, after: nn.Module, curves: list[Curve], size: Size, path: Path) -> None:
    """Sizes along the graph, fresh and trained, and the curves."""
    with panels(path, 2) as (left, right):
        for name, model, style in (("fresh", before, "-"), ("trained", after, "--")):
            seen = observe(model, draw("llama", size))
            for direction, colour in (("activation", "C0"), ("gradient", "C1")):
                line = [math.log2(max(v, 2.0**-40)) for (_, d), v in seen.items() if d == direction]
                left.plot(line if direction == "activation" else line[::-1], style, color=colour,
                          label=f"{name}: {direction}s")  # fmt: skip
        left.axhspan(-1, 1, color="0.85")
        left.set(title="native Llama", xlabel="module, first to last", ylabel="log2 RMS of data (grey: 1/2 to 2)")
        plot_training(right, "llama", curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("sizes", "training"))
    options = parser.parse_args()
    size = replace(QUICK if options.quick else FULL, seeds=options.seeds)
    if options.only != "training":
        found = measure_sizes(options.seeds)
        write(options.out / "sizes", {"width": WIDTH, "layers": LAYERS}, {"sizes": [asdict(s) for s in found]},
              [sizes_table(found)])  # fmt: skip
    if options.only != "sizes":
        rates = sweep(size)
        curves, trained = training(size, rates)
        raw = {"rates": [asdict(r) for r in rates], "runs": [asdict(c) for c in curves]}
        tables = [rates_table(rates), training_table("Training from scratch, llama, at the best rates", curves)]
        write(options.out / "training", asdict(size), raw, tables)
        figure(drawn("fp32")(start_model("llama", size, 0)), trained, curves, size, options.out / "figure.png")


def write(folder: Path, settings: dict[str, Any], raw: dict[str, Any], tables: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, settings, raw, tables)


if __name__ == "__main__":
    main()
