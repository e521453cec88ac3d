"""HALP, LP-SVRG and LP-SGD at 8 and 16 bits: how near the optimum each comes.

    python -m benchmarks.reproduce.halp --out DIRECTORY

1. Logistic regression on real data, L2-regularised: does a vowel follow the last three characters of the plays that
   ship with lpconv? 1,024 windows, 82 features.
2. Linear regression on synthetic data, 1,024 rows and 100 features, after the paper's first experiment.

An epoch takes the gradient of all data and two passes over as many rows. The grids of LP-SGD and LP-SVRG reach 1.25
times as far as the optimum does, which nobody knows beforehand; HALP runs with three guesses at μ.
The paper: De Sa et al. 2018, arXiv 1803.03383. Writes results.json.xz, table.md and figure.png.
`--quick` is for trying.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import markdown
from benchmarks.reproduce.byte_models import corpus
from benchmarks.reproduce.figures import panels
from benchmarks.reproduce.miniature import QUICK, read_arguments, save
from lpconv.optim import HALP, LPSGD, LPSVRG

ROWS, BATCH, TARGET = 1024, 4, 1e-6
MUS = (0.01, 0.03, 0.1)
VOWELS = b"aeiouAEIOU"


def windows(count: int) -> tuple[Tensor, Tensor]:
    """One-hot codes of the last three characters (letter or none) plus a constant, and whether a vowel follows."""
    text = corpus("train")
    at = torch.randint(3, len(text), (count,), generator=torch.Generator().manual_seed(0))
    lower = torch.where((text >= 65) & (text <= 90), text + 32, text)
    letter = torch.where((lower >= 97) & (lower <= 122), lower - 97, 26)
    codes = [F.one_hot(letter[at - back], 27) for back in (1, 2, 3)]
    features = torch.cat([*codes, torch.ones(count, 1)], dim=1).double()
    return features, torch.isin(text[at], torch.tensor(list(VOWELS))).double()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A loss over rows. `gradients(rows)` sets the gradients of `parameters`; `reach` is the largest weight at the
    optimum.
    """

    name: str
    parameters: list[Tensor]
    gradients: Callable[[Tensor], None]
    num_rows: int
    lr: float
    reach: float

    def norm(self) -> float:
        """Norm of the full gradient at the current weights."""
        self.gradients(torch.arange(self.num_rows))
        return float(torch.cat([p.grad.flatten() for p in self.parameters]).norm())  # type: ignore[union-attr]


def linear_model(
    name: str, a: Tensor, b: Tensor, residual: Callable[[Tensor, Tensor], Tensor], decay: float, lr: float, reach: float
) -> Problem:
    """A linear model with gradient mean(residual(a·w, b)·a) + decay·w."""
    w = torch.zeros(a.shape[1], dtype=torch.float64)

    def gradients(rows: Tensor) -> None:
        x = a[rows]
        w.grad = x.T @ residual(x @ w, b[rows]) / len(rows) + decay * w

    w.requires_grad_()
    return Problem(name=name, parameters=[w], gradients=torch.no_grad()(gradients), num_rows=len(a), lr=lr, reach=reach)


def logistic(rows: int) -> Problem:
    a, b = windows(rows)
    decay, w = 1e-2, torch.zeros(a.shape[1], dtype=torch.float64)
    for _ in range(20):  # Newton's method finds the range that the grids must cover
        p = torch.sigmoid(a @ w)
        hessian = a.T @ (a * (p * (1 - p))[:, None]) / len(a) + decay * torch.eye(len(w))
        w = w - torch.linalg.solve(hessian, a.T @ (p - b) / len(a) + decay * w)
    residual = lambda score, b: torch.sigmoid(score) - b  # noqa: E731
    return linear_model("logistic regression, text", a, b, residual, decay, 0.25, float(w.abs().max()))


def synthetic(rows: int) -> Problem:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(rows, 100, dtype=torch.float64, generator=draw) / 10
    truth, noise = (torch.randn(n, dtype=torch.float64, generator=draw) for n in (100, rows))
    b = a @ truth + 0.1 * noise
    best = torch.linalg.lstsq(a, b[:, None]).solution
    return linear_model("linear regression, synthetic", a, b, torch.sub, 0.0, 0.5, float(best.abs().max()))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Gradient norms relative to the start, before the first epoch and after each."""

    problem: str
    method: str
    norms: list[float]
    time_s: float


METHODS: dict[str, Callable[[Problem], LPSGD]] = {
    "LP-SGD, 8 bits": lambda p: LPSGD(p.parameters, lr=p.lr, spacing=1.25 * p.reach / 127, bits=8),
    "LP-SGD, 16 bits": lambda p: LPSGD(p.parameters, lr=p.lr, spacing=1.25 * p.reach / 32767, bits=16),
    "LP-SVRG, 8 bits": lambda p: LPSVRG(p.parameters, lr=p.lr, spacing=1.25 * p.reach / 127, bits=8),
    "LP-SVRG, 16 bits": lambda p: LPSVRG(p.parameters, lr=p.lr, spacing=1.25 * p.reach / 32767, bits=16),
    **{
        f"HALP, {bits} bits, μ = {mu}": lambda p, mu=mu, bits=bits: HALP(p.parameters, lr=p.lr, mu=mu, bits=bits)
        for bits in (8, 16)
        for mu in MUS
    },
    "SVRG, offset of 24 bits": lambda p: HALP(p.parameters, lr=p.lr, mu=MUS[0], bits=24),
}


def trace(problem: Problem, method: str, epochs: int) -> Trace:
    """Run a method on a fresh problem, with the same batches as the others."""
    draw, began = torch.Generator().manual_seed(1), time.perf_counter()
    first = problem.norm()
    optimizer = METHODS[method](problem)
    everything = torch.arange(problem.num_rows)
    norms = [1.0]
    for _ in range(epochs):
        if isinstance(optimizer, LPSVRG):
            optimizer.recentre(lambda: problem.gradients(everything))
        for _ in range(problem.num_rows // BATCH * 2):
            rows = torch.randint(0, problem.num_rows, (BATCH,), generator=draw)
            optimizer.step(lambda rows=rows: problem.gradients(rows))
        norms.append(problem.norm() / first)
    print(f"{problem.name}: {method}: {norms[-1]:.1e}", flush=True)
    return Trace(problem=problem.name, method=method, norms=norms, time_s=round(time.perf_counter() - began, 1))


def table(traces: list[Trace]) -> str:
    rows = []
    for t in traces:
        reached = next((str(i) for i, n in enumerate(t.norms) if n <= TARGET), "never")
        rows.append((t.problem, t.method, f"{min(t.norms):.1e}", f"{t.norms[-1]:.1e}", reached, f"{t.time_s:.0f}"))
    lowest = "gradient norm over the first: lowest"
    return markdown(("problem", "method", lowest, "at the end", f"epochs to {TARGET:.0e}", "s"), rows)


def figure(traces: list[Trace], path: Path) -> None:
    names = list(dict.fromkeys(t.problem for t in traces))
    with panels(path, len(names)) as axes:
        for ax, name in zip(axes, names, strict=True):
            for t in (t for t in traces if t.problem == name):
                ax.plot(t.norms, "--" if "16" in t.method else "-", label=t.method)
            ax.set(title=name, xlabel="epoch", ylabel="gradient norm over the first", yscale="log")


def main() -> None:
    out, size = read_arguments(__doc__)
    rows, epochs = (64, 2) if size == QUICK else (ROWS, 12)
    traces = [trace(build(rows), method, epochs) for build in (logistic, synthetic) for method in METHODS]
    settings = {"rows": rows, "batch": BATCH, "epochs": epochs, "target": TARGET}
    save(out, settings, {"traces": [asdict(t) for t in traces]}, [table(traces)])
    figure(traces, out / "figure.png")


if __name__ == "__main__":
    main()
