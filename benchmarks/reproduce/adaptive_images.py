"""Adaptive loss scaling of convolutions: a small residual network on scikit-learn's handwritten digits, in fp16.

    python benchmarks/reproduce/adaptive_images.py --out benchmarks/results/adaptive/images

1. Gradients of one batch at initialisation, with batch norms and without: every constant loss scale from 2^0 to 2^32
   beside the adaptive one.
2. Training for 8 epochs by constants, a dynamic scale and adaptive ones with other options, 3 seeds. In the setting
   "alone" a batch is a step of its own; in "one of 2048" the loss is that of a micro-batch of a step that averages
   2048 of them, so that its gradients are 2048 times smaller and the step is as before.

The claim of Zhao, Vogel, Ahmed 2019 (arXiv 1910.12385) is that no loss scale needs to be searched for. 1,797 images of
8 x 8 pixels, 360 of them held out. Writes results.json and table.md. `--quick` is for trying the script.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch
import torch.nn.functional as F
from adaptive import Sweep, adaptive, sweep, sweep_table
from miniature import QUICK, Arm, amp_fp16, read_arguments, save, spread
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lpconv.kernels.matmul import HalfProducts
from lpconv.loss_scale import make_loss_scale, unscale_
from lpconv.scaled import AdaptiveOptions, StepGuard, adaptive_scaling

NUM_HELD_OUT, BATCH, EPOCHS, SEEDS = 360, 64, 8, 3
SETTINGS = {"alone": 1, "one of 2048": 2048}
CONSTANTS = (0, 8, 16, 24)


class Block(nn.Module):
    """x + conv(relu(conv(x))), each convolution with its norm; a stride halves the image on both ways."""

    def __init__(self, width_in: int, width: int, stride: int, is_normed: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d if is_normed else nn.Identity  # type: ignore[assignment]
        self.first, self.first_norm = nn.Conv2d(width_in, width, 3, stride, 1, bias=not is_normed), norm(width)
        self.last, self.last_norm = nn.Conv2d(width, width, 3, 1, 1, bias=not is_normed), norm(width)
        self.way = nn.Identity() if stride == 1 else nn.Conv2d(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.way(x) + self.last_norm(self.last(inner)))


class Residual(nn.Module):
    """A residual network of 10 convolutions; it returns its loss and its logits, as models of transformers do."""

    def __init__(self, is_normed: bool, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        sizes = [(width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        self.blocks = nn.Sequential(*(Block(a, b, stride, is_normed) for a, b, stride in sizes))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = self.blocks(F.relu(self.stem(x))).mean((2, 3))
        logits = self.head(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels), logits


NETS = {"batch norms": True, "no norms": False}
ARMS = [
    Arm(name="fp32", prepare=lambda m: m),
    *(
        Arm(name=f"constant 2^{p}", prepare=lambda m: m, around=amp_fp16, loss_scale=("constant", {"scale": 2.0**p}))
        for p in CONSTANTS
    ),
    Arm(name="dynamic from 2^16", prepare=lambda m: m, around=amp_fp16, loss_scale=("dynamic", {})),
    Arm(name="adaptive", prepare=adaptive, guarded=True),
    *(
        Arm(name=f"adaptive, {name}", prepare=lambda m, o=options: adaptive_scaling(m, options=o), guarded=True)
        for name, options in {
            "T = 1e-2": AdaptiveOptions(threshold=1e-2),
            "T = 1e-4": AdaptiveOptions(threshold=1e-4),
            "every 10": AdaptiveOptions(every=10),
            "log-normal casts": AdaptiveOptions(casts="lognormal"),
        }.items()
    ),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A network trained: its loss on held-out images, the share of them it knows, and steps left out."""

    net: str
    setting: str
    arm: str
    seed: int
    held_out_loss: float
    accuracy: float
    skipped: int


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images of mean 0 and deviation 1, and what they show, in an order that mixes writers."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None], torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return ((images - images.mean()) / images.std())[order], labels[order]


def one_batch(is_normed: bool, parts: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    images, labels = (x[:BATCH] for x in digits())

    def loss(net: nn.Module) -> Tensor:
        out: Tensor = net(images.to(next(net.parameters()).dtype), labels)[0]
        return out / parts

    return Residual(is_normed), loss


def train(net: str, setting: str, arm: Arm, seed: int, epochs: int) -> Run:
    """SGD with momentum, its rate decayed by a cosine."""
    torch.manual_seed(seed)
    images, labels = digits()
    train_images, train_labels = images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:]
    model, parts = arm.prepare(Residual(NETS[net])).train(), SETTINGS[setting]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * parts, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(train_labels) // BATCH))
    scale, guard = make_loss_scale(arm.loss_scale[0], **arm.loss_scale[1]), StepGuard(model) if arm.guarded else None
    with HalfProducts(), arm.around():
        for _ in range(epochs):
            for rows in torch.randperm(len(train_labels)).split(BATCH)[: len(train_labels) // BATCH]:
                optimizer.zero_grad()
                (model(train_images[rows], train_labels[rows])[0] / parts * scale.scale).backward()
                found_nonfinite = unscale_(model.parameters(), scale.scale)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 / parts)
                if guard is not None:
                    guard.step(optimizer)
                elif not found_nonfinite:
                    optimizer.step()
                scale.update(found_nonfinite)
                schedule.step()
        model.eval()
        with torch.no_grad():
            loss, logits = model(images[:NUM_HELD_OUT], labels[:NUM_HELD_OUT])
    right = float((logits.argmax(1) == labels[:NUM_HELD_OUT]).float().mean())
    skipped = scale.num_skipped if guard is None else guard.num_skipped
    return Run(
        net=net, setting=setting, arm=arm.name, seed=seed, held_out_loss=float(loss), accuracy=right, skipped=skipped
    )


def training_table(net: str, runs: Sequence[Run]) -> str:
    """Means over seeds of one network; differences to fp32 seed by seed, ± their deviation."""
    settings = list(dict.fromkeys(r.setting for r in runs))
    lines = ["| scale |" + "".join(f" {s}: loss | over fp32 | accuracy | skipped |" for s in settings)]
    lines.append("|---" * (1 + 4 * len(settings)) + "|")
    for arm in dict.fromkeys(r.arm for r in runs):
        cells = []
        for setting in settings:
            here = [r for r in runs if (r.net, r.setting, r.arm) == (net, setting, arm)]
            base = [r for r in runs if (r.net, r.setting, r.arm) == (net, setting, "fp32")]
            excess = [r.held_out_loss - b.held_out_loss for r, b in zip(here, base, strict=True)]
            loss, right = (
                statistics.fmean(v) for v in zip(*((r.held_out_loss, r.accuracy) for r in here), strict=True)
            )
            skipped = statistics.fmean(r.skipped for r in here)
            cells.append(f"{loss:.4f} | {spread(excess, '+.4f')} | {right:.1%} | {skipped:.1f}")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join([f"Training, {net}, {len({r.seed for r in runs})} seeds", "", *lines, ""])


def main() -> None:
    out, size = read_arguments(__doc__)
    epochs, seeds = (1, 1) if size is QUICK else (EPOCHS, SEEDS)
    swept: dict[str, list[Sweep]] = {
        f"{net}, {setting}": sweep(f"{net}, {setting}", lambda n=is_normed, p=parts: one_batch(n, p))
        for net, is_normed in NETS.items()
        for setting, parts in SETTINGS.items()
    }
    runs = []
    for seed in range(seeds):
        for net in NETS:
            for setting in SETTINGS:
                for arm in ARMS:
                    runs.append(train(net, setting, arm, seed, epochs))
                    print(runs[-1], file=sys.stderr, flush=True)
    tables = [
        *(sweep_table(name, found) for name, found in swept.items()),
        *(training_table(net, runs) for net in NETS),
    ]
    raw = {"sweeps": [asdict(s) for found in swept.values() for s in found], "runs": [asdict(r) for r in runs]}
    save(out, {"epochs": epochs, "seeds": seeds, "batch": BATCH, "held_out": NUM_HELD_OUT}, raw, tables)


if __name__ == "__main__":
    main()
