"""Attention without norms in native fp8: do the square root of softmax or norms at the end of branches keep it on path?

    python -m benchmarks.reproduce.unit_attention --out FILE.json [--seeds 6] [--table]

A language model over bytes without norms in its branches, of 3 attentions and 3 feed-forward layers of width 64, 120
steps from scratch with native unit scaling. One of three fp8 runs of this model diverged in the sweep of character
models. µnit Scaling (Narayan et al. 2025, arXiv 2502.05967) replaces softmax by its square root, so that an average of
n values of unit size has unit size, and moves norms to the end of each branch. Here each is tried alone, and both;
norms before the branch are the usual model. Runs of a seed have the same start and batches. A run has left its path if
it is more than 0.1 nats worse than the fp32 run of its seed. Runs are saved as they end, and the same command resumes.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from benchmarks import common
from benchmarks.reproduce.miniature import Size, train
from benchmarks.reproduce.native import native_arm
from lpconv.student import estimate_mean

NUM_BYTES, HEAD_SIZE, DEPTH = 256, 32, 3
SIZE = Size(hidden=64, steps=120, evaluate_every=120)
RATE, LEFT = 2.0**-4, 0.1  # best fp32 rate of an earlier sweep
MODELS = {  # place of the norms, and whether softmax is replaced by its square root
    "no norms": ("none", False),
    "no norms, square root of softmax": ("none", True),
    "norms after branches": ("branch", False),
    "norms after branches, square root of softmax": ("branch", True),
    "norms before branches": ("pre", False),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, *, has_root: bool) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.has_root = has_root

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2) for y in self.inner(x_BLD).chunk(3, 2))
        if self.has_root:
            future = torch.ones(x_BLD.shape[1], x_BLD.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(HEAD_SIZE)
            # The square root of softmax as exp(log softmax / 2), to avoid its infinite slope at 0.
            heads = (scores.masked_fill(future, -1e4).log_softmax(-1) * 0.5).exp() @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """A ReLU layer of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(x_BLD)))


class Branch(nn.Module):
    """√(1-τ)·x + √τ·f(x) with τ = 1/(1 + index), the running mean of all branches."""

    def __init__(self, body: nn.Module, width: int, norm: str, index: int) -> None:
        super().__init__()
        tau = 1 / (1 + index)
        self.weights = math.sqrt(1 - tau), math.sqrt(tau)
        self.body, self.place = body, norm
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        stay, go = self.weights
        out = self.norm(self.body(x)) if self.place == "branch" else self.body(self.norm(x))
        return x * stay + out * go


class ByteLM(nn.Module):
    """Predict each byte from the preceding ones; the model computes its loss in nats."""

    def __init__(self, norm: str, *, has_root: bool) -> None:
        super().__init__()
        width = SIZE.hidden
        self.embedding, self.positions = nn.Embedding(NUM_BYTES, width), nn.Embedding(SIZE.length, width)
        bodies = [body for _ in range(DEPTH) for body in (Attention(width, has_root=has_root), Feedforward(width))]
        self.trunk = nn.Sequential(*(Branch(body, width, norm, i) for i, body in enumerate(bodies, start=1)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1] - 1)
        x = self.embedding(input_ids[:, :-1]) + self.positions(places)
        logits = self.head(self.norm(self.trunk(x)))
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Final held-out loss in nats per byte, in the run's own arithmetic."""

    model: str
    compute: str
    seed: int
    loss: float
    time_s: float


def run(model: str, compute: str, seed: int) -> Run:
    norm, has_root = MODELS[model]
    arm = native_arm("", compute, "unit", RATE)
    curve, _ = train(arm, "llama", seed, SIZE, lambda: ByteLM(norm, has_root=has_root))
    return Run(model=model, compute=compute, seed=seed, loss=curve.held_out_loss[-1], time_s=curve.time_s)


def table(runs: Sequence[Run]) -> str:
    """Mean loss in fp32, the loss that fp8 adds, and the number of fp8 runs off their path."""
    rows = []
    for model in MODELS:
        here = [r for r in runs if r.model == model]
        exact = {r.seed: r.loss for r in here if r.compute == "fp32"}
        added = [r.loss - exact[r.seed] for r in here if r.compute == "fp8" and r.seed in exact]
        if added:
            gap = estimate_mean(added)
            half = f" ± {gap.high - gap.value:.3f}" if len(added) > 1 else ""
            left = str(sum(x > LEFT for x in added))
            mean = f"{statistics.fmean(exact.values()):.3f}"
            rows.append((model, str(len(added)), mean, f"{gap.value:+.3f}{half}", left))
    return common.markdown(("model", "seeds", "fp32", "fp8 over fp32", "left"), rows)


def recorded_runs() -> list[Run]:
    return [Run(**r) for r in common.recorded("unit-attention")["runs"]]


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--table", action="store_true", help="print the table of the file, and run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [Run(**r) for r in common.load(args.out)["runs"]] if args.out.exists() else []
    done = {(r.model, r.compute, r.seed) for r in runs}
    wanted = [] if args.table else [
        (model, compute, seed) for seed in range(args.seeds) for model in MODELS for compute in ("fp32", "fp8")
    ]  # fmt: skip
    for key in wanted:
        if key not in done:
            runs.append(run(*key))
            print(runs[-1], file=sys.stderr, flush=True)
            settings: dict[str, Any] = asdict(SIZE) | {"rate": RATE, "left": LEFT}
            head = {"command": common.command(), "machine": common.machine(), "settings": settings}
            common.save({**head, "runs": [asdict(r) for r in runs]}, args.out)
    print(table(runs))


if __name__ == "__main__":
    main()
