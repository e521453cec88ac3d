"""HALP on a small network: does bit centring help where the loss is not convex?

    python benchmarks/reproduce/halp_network.py --out benchmarks/results/halp/network

One hidden layer of 16 tanh units on the text problem of halp.py (1,024 windows, does a vowel follow?), L2-regularised,
three seeds of weights and batches. SGD and SVRG in full precision, and LP-SGD, LP-SVRG and HALP with 8 bits, at one
learning rate; the fixed grids reach 1.25 times as far as the weights that SGD ends at. HALP runs with four guesses at
μ, which a function that is not convex does not have. The paper's networks are a LeNet and an LSTM (De Sa et al. 2018,
arXiv 1803.03383, section 6). Writes results.json and table.md. `--quick` is for trying.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from halp import ROWS, windows
from miniature import QUICK, read_arguments, save, spread
from torch import Tensor
from torch.nn import functional as F

from lpconv.optim import HALP, LPSGD, LPSVRG

HIDDEN, DECAY, LR, BATCH, EPOCHS, SEEDS = 16, 1e-3, 0.5, 16, 15, 3
MUS = (0.01, 0.03, 0.1, 0.3)


class Network:
    """The parameters, and the loss of rows with its gradients."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.features, self.targets = windows(rows)
        shapes = ((self.features.shape[1], HIDDEN), (HIDDEN, 1), (1,))
        sizes = (0.3, HIDDEN**-0.5, 0.0)
        self.parameters = [
            (size * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()
            for shape, size in zip(shapes, sizes, strict=True)
        ]

    def loss(self, rows: Tensor) -> Tensor:
        inner, outer, bias = self.parameters
        logits = (torch.tanh(self.features[rows] @ inner) @ outer + bias)[:, 0]
        decay = sum(p.square().sum() for p in self.parameters) * (DECAY / 2)
        return F.binary_cross_entropy_with_logits(logits, self.targets[rows]) + decay

    def closure(self, rows: Tensor) -> Callable[[], float]:
        def run() -> float:
            for p in self.parameters:
                p.grad = None
            loss = self.loss(rows)
            loss.backward()
            return loss.item()

        return run

    def state(self) -> tuple[float, float]:
        """Loss and gradient norm over all rows."""
        loss = self.closure(torch.arange(len(self.features)))()
        return loss, float(torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None]).norm())


Optimizer = Callable[[list[Tensor], float], torch.optim.Optimizer]
METHODS: dict[str, Optimizer] = {
    "SGD, fp64": lambda p, reach: torch.optim.SGD(p, lr=LR),
    "SVRG, offset of 24 bits": lambda p, reach: HALP(p, lr=LR, mu=MUS[0], bits=24),
    "LP-SGD, 8 bits": lambda p, reach: LPSGD(p, lr=LR, spacing=1.25 * reach / 127, bits=8),
    "LP-SVRG, 8 bits": lambda p, reach: LPSVRG(p, lr=LR, spacing=1.25 * reach / 127, bits=8),
    **{f"HALP, 8 bits, μ = {mu}": lambda p, reach, mu=mu: HALP(p, lr=LR, mu=mu, bits=8) for mu in MUS},
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A run: loss and gradient norm over all rows before the first epoch and after each."""

    method: str
    seed: int
    losses: list[float]
    norms: list[float]


def trace(method: str, seed: int, rows: int, epochs: int, reach: float) -> tuple[Trace, float]:
    """One run, and its largest weight; batches are the same for all methods of a seed."""
    network, draw = Network(rows, seed), torch.Generator().manual_seed(1000 + seed)
    optimizer = METHODS[method](network.parameters, reach)
    states = [network.state()]
    for _ in range(epochs):
        if isinstance(optimizer, LPSVRG):
            optimizer.recentre(network.closure(torch.arange(rows)))
        for _ in range(rows // BATCH * 2):
            optimizer.step(network.closure(torch.randint(0, rows, (BATCH,), generator=draw)))
        states.append(network.state())
    print(f"seed {seed}  {method:24} loss {states[-1][0]:.4f}, gradient norm {states[-1][1]:.1e}", flush=True)
    losses, norms = zip(*states, strict=True)
    largest = max(float(p.detach().abs().max()) for p in network.parameters)
    return Trace(method=method, seed=seed, losses=list(losses), norms=list(norms)), largest


def table(traces: list[Trace]) -> str:
    lines = ["| method | training loss | over SVRG, seed by seed | gradient norm |", "|---|---|---|---|"]
    by_method = {m: [t for t in traces if t.method == m] for m in METHODS}
    base = [t.losses[-1] for t in by_method["SVRG, offset of 24 bits"]]
    for method, runs in by_method.items():
        losses = [t.losses[-1] for t in runs]
        excess = [a - b for a, b in zip(losses, base, strict=True)]
        norm = statistics.median(t.norms[-1] for t in runs)
        lines.append(f"| {method} | {statistics.fmean(losses):.4f} | {spread(excess, '+.4f')} | {norm:.1e} |")
    return "\n".join([f"Network, {len(base)} seeds, means and the median norm", "", *lines, ""])


def main() -> None:
    out, size = read_arguments(__doc__)
    rows, epochs, seeds = (64, 2, 1) if size == QUICK else (ROWS, EPOCHS, SEEDS)
    settings = {"rows": rows, "hidden": HIDDEN, "decay": DECAY, "lr": LR, "epochs": epochs, "batch": BATCH}
    traces = []
    for seed in range(seeds):
        reach = 1.0
        for method in METHODS:
            found, largest = trace(method, seed, rows, epochs, reach)
            reach = largest if method.startswith("SGD") else reach
            traces.append(found)
        # After each seed, so that a cut leaves whole comparisons.
        save(out, settings, {"traces": [asdict(t) for t in traces]}, [table(traces)])


if __name__ == "__main__":
    main()
