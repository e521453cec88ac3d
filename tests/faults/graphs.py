"""Random graphs of tensor ops on scaled tensors, compared with the same graphs in plain torch.

A graph is drawn step by step. A step is left out if plain torch refuses it, if its result leaves a moderate range, or
if lpconv refuses the op by name. The oracle is plain torch: every result has its dtype, shape and value, and so has
every gradient. Values are equal bit for bit if all are fp32, or all fp64, and all ops are exact at any power-of-two
scale; otherwise they differ by at most `_ROUNDINGS` times as much as plain torch changes if each of its
results is rounded once more.

`python -m tests.faults.graphs --long --seed 1` runs for hours. Failing graphs are shrunk and printed.
"""

import argparse
import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpconv.errors import LpconvError
from lpconv.scaled import ScaledTensor, scaled_tensor
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.rules.own import leave
from tests.faults.graph_ops import OPS, tensor_of

_SHAPES = [(4, 6), (4, 6), (6, 6), (6,), (1, 6), (2, 3, 4), (4, 4), ()]
_DTYPES = ["float32", "float32", "float32", "bfloat16", "float16", "float64"]
_ROUNDINGS = 16
_PLAIN_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ZeroDivisionError)


class Leaf(NamedTuple):
    """A tensor to start from: its dtype, shape and seed, and its scale and role as a scaled tensor."""

    dtype: str
    shape: tuple[int, ...]
    seed: int
    scale: float
    role: Role

    def value(self) -> Tensor:
        """Multiples of 1/64 up to 4, which every dtype represents exactly, divided by any scale drawn here."""
        steps = (tensor_of("float32", self.shape, self.seed).clamp(-4, 4) * 64).round()
        return (steps / 64).to(getattr(torch, self.dtype))


class Step(NamedTuple):
    """An op of `OPS` on earlier results."""

    op: str
    inputs: tuple[int, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class Graph:
    """Leaves, numbered from 0, and steps, numbered after them."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...] = ()
    dynamic: bool = False
    strict: bool = False

    def __str__(self) -> str:
        numbered = enumerate((*self.leaves, *self.steps))
        lines = [f"  {i}: {x.op}{x.inputs} {x.settings}" if isinstance(x, Step) else f"  {i}: {x}" for i, x in numbered]
        return "\n".join([f"{'dynamic' if self.dynamic else 'static'} scales, strict={self.strict}", *lines])


class Run:
    """A graph on plain or scaled tensors: its leaves and the results so far, in order.

    With `noise`, plain results and the gradients of results are rounded once more, at random.
    """

    def __init__(self, graph: Graph, *, is_scaled: bool = False, noise: int | None = None) -> None:
        self.graph, self.is_scaled = graph, is_scaled
        self.noise = None if noise is None else torch.Generator().manual_seed(noise)
        self.numerics = Numerics(strict=graph.strict)
        self.leaves = [self._leaf(leaf) for leaf in graph.leaves]
        pairs = zip(self.leaves, graph.leaves, strict=True)
        self.results = [x if leaf.role is Role.WEIGHT else x * 1 for x, leaf in pairs]
        if noise is not None:
            self.results = [x if x.is_leaf else x * self._rounding(x) for x in self.results]
        for step in graph.steps:
            self.take(step)

    def _leaf(self, leaf: Leaf) -> Tensor:
        x = leaf.value()
        if self.is_scaled:
            scale = torch.tensor(leaf.scale) if self.graph.dynamic else leaf.scale
            x = scaled_tensor(x / leaf.scale, scale, role=leaf.role, numerics=self.numerics)
        return x.requires_grad_()

    def take(self, step: Step) -> None:
        """Append the result of a step."""
        out = OPS[step.op].apply(*(self.results[i] for i in step.inputs), *step.settings)
        if self.noise is not None and out.is_floating_point() and not self._is_view(out):
            out = out * self._rounding(out)
            if out.requires_grad:
                out.register_hook(lambda g: g * self._rounding(g))
        self.results.append(out)

    def _is_view(self, out: Tensor) -> bool:
        return any(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in self.results)

    def _rounding(self, x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=self.noise) * 2 - 1
        return 1 + (signs * _eps(x, *self.results)).to(x.dtype)

    def gradients(self) -> list[Tensor | None]:
        """Gradients of Σ w·result over all results, for the leaves."""
        total = torch.zeros((), dtype=torch.float64)
        unit = scaled_tensor(torch.ones(()), 1.0, role=Role.GRADIENT, numerics=self.numerics)
        for index, x in enumerate(self.results):
            if x.requires_grad:
                values = leave(x, unit if isinstance(x, ScaledTensor) else torch.ones(()), self.graph.dynamic)
                total = total + (values.double() * tensor_of("float64", tuple(x.shape), index)).sum()
        if total.requires_grad:
            total.backward()
        return [x.grad for x in self.leaves]


def is_moderate(x: Tensor) -> bool:
    """Whether values are finite and far from the ends of the range of fp16, or of the range of scales."""
    if not x.dtype.is_floating_point:
        return True
    high, low = (2.0**9, 2.0**-7) if x.dtype == torch.float16 else (2.0**20, 2.0**-20)
    sizes = x.detach().abs().double()
    return bool((sizes.isfinite() & (sizes <= high) & ((sizes >= low) | (sizes == 0))).all())


def _leaves_range(x: Tensor) -> bool:
    """Whether data near the ends of fp16's range have lost bits that the value would have kept."""
    return isinstance(x, ScaledTensor) and x.dtype == torch.float16 and not is_moderate(x.data_part)


class RefusedError(Exception):
    """lpconv refused an op by name."""


class Comparison:
    """A scaled run beside the plain run of the same graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.plain, self.scaled = Run(graph), Run(graph, is_scaled=True)
        self.noisy: list[Run] = []

    def difference(self) -> str | None:
        """How results or gradients differ; None if they do not. Raises `RefusedError` for a refused backward pass."""
        results = self._first("result", self.scaled.results, self.plain.results, lambda run: run.results)
        if results is not None:
            return results
        try:
            expected, reason = self.plain.gradients(), ""
        except RuntimeError as e:
            expected, reason = [], str(e)
            if "inplace" not in reason:  # a limit of a derivative in plain torch
                return None
        try:
            got = self.scaled.gradients()
        except LpconvError as e:
            raise RefusedError(e.message) from e
        except Exception as e:
            return None if reason else f"the backward pass raises {type(e).__name__}: {e}"
        if reason:
            return f"the backward pass does not raise: {reason}"
        if not all(g is None or is_moderate(g) for g in expected):
            return None
        return self._first("gradient", got, expected, lambda run: [x.grad for x in run.leaves])

    def _first(self, name: str, got: Any, expected: Any, same: Callable[[Run], Any]) -> str | None:
        """The first tensor that differs; `same` gives the tensors of another run."""
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if (ours is None) != (theirs is None):
                return f"{name} {index} is {ours}, not {theirs}"
            if theirs is None:
                continue
            if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
                return f"{name} {index} is {ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
            ours = ours.dequantize(ours.dtype) if isinstance(ours, ScaledTensor) else ours.detach()
            if not (torch.equal(ours, theirs) or self._is_close(ours, theirs.detach(), same, index)):
                return f"{name} {index} is {ours.tolist()}, not {theirs.tolist()}"
        return None

    def _is_close(self, ours: Tensor, theirs: Tensor, same: Callable[[Run], Any], index: int) -> bool:
        eps = _eps(theirs, *self.plain.results)
        is_mixed = len({x.dtype for x in self.plain.results if x.is_floating_point()}) > 1
        if all(OPS[s.op].exact for s in self.graph.steps) and eps < 2.0**-20 and not is_mixed:
            return False
        if not self.noisy:
            self.noisy = [_noisy(self.graph, seed) for seed in range(16)]
        changes = [float((same(run)[index].detach().double() - theirs.double()).abs().max()) for run in self.noisy]
        bound = _ROUNDINGS * (max(changes) + eps * float(theirs.double().abs().max())) + 2.0**-100
        is_far = (ours.double() - theirs.double()).abs() > bound  # never, if noise makes the plain graph undefined
        return bool(ours.isfinite().all() and not is_far.any())


def _eps(*tensors: Tensor) -> float:
    """The coarsest eps of the tensors' dtypes."""
    return max((torch.finfo(x.dtype).eps for x in tensors if x.is_floating_point()), default=0.0)


def _noisy(graph: Graph, seed: int) -> Run:
    run = Run(graph, noise=seed)
    with contextlib.suppress(RuntimeError):
        run.gradients()
    return run


def difference(graph: Graph) -> str | None:
    """How the scaled graph differs from the plain one; None if it does not, or if one of the two is refused."""
    try:
        if not all(map(is_moderate, Run(graph).results)):
            return None
    except _PLAIN_ERRORS:
        return None
    try:
        return Comparison(graph).difference()
    except (LpconvError, RefusedError):
        return None
    except Exception as e:
        return f"raises {type(e).__name__}: {e}"


def draw(rng: Random, refusals: Counter[str], *, size: int = 14) -> tuple[Graph, str | None]:
    """A random graph, and how it differs. Refused ops are counted and left out."""
    both = Comparison(_draw_leaves(rng))
    for _ in range(4 * size):
        step = _draw_step(rng, both.plain)
        if step is None or len(both.graph.steps) == size:
            continue
        longer = replace(both.graph, steps=(*both.graph.steps, step))
        try:
            both.plain.take(step)
        except _PLAIN_ERRORS:
            both.plain = Run(both.graph)
            continue
        if not all(map(is_moderate, both.plain.results)) or both.plain.results[-1].numel() > 200:
            both.plain = Run(both.graph)
            continue
        try:
            both.scaled.take(step)
        except LpconvError as e:  # the scaled run goes on: a refused op leaves no trace
            refusals[f"{step.op}: {e.message}"] += 1
            both.plain = Run(both.graph)
            continue
        except Exception as e:
            return longer, f"raises {type(e).__name__}: {e}"
        if _leaves_range(both.scaled.results[-1]):
            both.plain, both.scaled = Run(both.graph), Run(both.graph, is_scaled=True)
            continue
        both.graph = longer
    try:
        return both.graph, both.difference()
    except RefusedError as e:
        refusals[str(e)] += 1
        return both.graph, None


def _draw_leaves(rng: Random) -> Graph:
    dtypes = [rng.choice(_DTYPES)] * 3 if rng.random() < 0.6 else rng.choices(_DTYPES, k=3)
    roles = rng.choices([Role.ACTIVATION, Role.ACTIVATION, Role.WEIGHT], k=3)
    leaves = tuple(
        Leaf(
            dtype,
            rng.choice(_SHAPES),
            rng.randrange(1000),
            2.0 ** (rng.randint(-1, 1) if dtype == "float16" else rng.randint(-3, 3)),
            role,
        )
        for dtype, role in zip(dtypes, roles, strict=True)
    )
    return Graph(leaves, dynamic=rng.random() < 0.4, strict=rng.random() < 0.3)


def _draw_step(rng: Random, run: Run) -> Step | None:
    name, last = rng.choice(list(OPS)), len(run.results) - 1
    inputs = tuple(rng.choice([rng.randint(0, last), last]) for _ in range(OPS[name].arity))
    try:
        return Step(name, inputs, OPS[name].draw(rng, *(run.results[i] for i in inputs)))
    except _PLAIN_ERRORS:
        return None


def shrink(graph: Graph) -> Graph:
    """A graph that still differs and from which no step can be dropped."""
    for index in reversed(range(len(graph.steps))):
        shorter = _without(graph, index)
        if shorter is not None and difference(shorter) is not None:
            return shrink(shorter)
    return graph


def _without(graph: Graph, index: int) -> Graph | None:
    """The graph without a step; steps that use its result use the step's first input instead."""
    dropped, number = graph.steps[index], len(graph.leaves) + index
    renamed = [i - (i > number) if i != number else dropped.inputs[0] for i in range(len(graph.steps) + number + 1)]
    rest = (*graph.steps[:index], *graph.steps[index + 1 :])
    return replace(graph, steps=tuple(s._replace(inputs=tuple(renamed[i] for i in s.inputs)) for s in rest))


def failures(graphs: int, seed: int, refusals: Counter[str]) -> Iterator[tuple[int, Graph, str]]:
    """Number, shrunk graph and difference of each failing graph."""
    for number in range(seed, seed + graphs):
        graph, what = draw(Random(number), refusals)
        if what is not None:
            small = shrink(graph)
            yield number, small, difference(small) or what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="20,000 graphs instead of 1,000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_graphs = 20000 if options.long else 1000
    warnings.simplefilter("ignore")
    refusals: Counter[str] = Counter()
    start, count = time.monotonic(), 0
    for number, graph, what in failures(num_graphs, options.seed, refusals):
        count += 1
        print(f"graph {number}: {what}\n{graph}\n", flush=True)
    for message, times in refusals.most_common():
        print(f"refused {times} times: {message}")
    print(f"{num_graphs} graphs, {count} differ, {time.monotonic() - start:.0f} s")
    raise SystemExit(count > 0)


if __name__ == "__main__":
    main()
