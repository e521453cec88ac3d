"""Device time of lpconv's kernels on a GPU, as a share of what its memory and tensor cores allow.

    python -m benchmarks.speed.gpu_kernels --out gpu-kernels.json          # three minutes
    python -m benchmarks.speed.gpu_kernels --dry-run                       # the same code on the CPU, at toy size

Measures the limits first: a copy of 2 GiB, and products of size 8,192 in bf16 and fp8. Then optimizer steps, casts,
decoding, and forward and backward passes of one linear layer, next to torch's and, if installed, torchao's. `share` is
the least possible time, by bytes or operations, over the median.

Times are from CUDA events. Before each run 512 MiB are written, so that no input is in the cache, and the GPU is kept
busy while the host launches, so that launches are not counted. All runs of a group alternate.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.speed import optimizer
from lpconv.kernels.decode import decode
from lpconv.kernels.linear import FP8_RECIPES, calibrate, use_recipe
from lpconv.kernels.matmul import matmul
from lpconv.kernels.operands import OperandCast, encode_operand
from lpconv.optim.storage import VARIANTS

_BUSY_CYCLES = 4_000_000  # about 2 ms, enough for the host to queue a run
_ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sides of matrices (for the limits and the casts), and the tokens and width of the layer."""

    product: int
    cast: int
    tokens: int
    width: int
    copied: int
    parameters: int


FULL = Size(product=8192, cast=8192, tokens=8192, width=4096, copied=2**30, parameters=268_435_456)
TOY = Size(product=64, cast=64, tokens=64, width=64, copied=2**16, parameters=50_000)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. `least` is the least number of bytes that it must move, or of its tensor-core operations."""

    group: str
    name: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    least: float
    share: float | None = None


def main() -> None:
    """Measure, print and save."""
    parser = common.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    options = parser.parse_args()
    device, size = ("cpu", TOY) if options.dry_run else ("cuda", FULL)
    limits, rows = measure(device, size, options.only)
    result = document(device, limits, rows)
    print(table(result))
    common.save(result, options.out)


def document(device: str, limits: dict[str, float], rows: list[Row]) -> dict[str, Any]:
    """The result in its recorded form."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    machine = {**common.machine("torchao", "triton"), "gpu": name, "cuda": torch.version.cuda}
    return {**machine, "limits": limits, "rows": [asdict(r) for r in rows]}


def measure(
    device: str, size: Size, groups: Iterable[str] = ("casts", "layers", "steps")
) -> tuple[dict[str, float], list[Row]]:
    """The limits, in bytes or operations per second, and the rows of all groups with their share of these."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # many runs compile the same code with different options
    first = [*limit_rows(device, size)]
    limits = {r.name: 1e3 * r.least / r.median_ms for r in first}
    rows = [*first]
    for group in groups:
        for row, limit in GROUPS[group](device, size):
            torch.cuda.empty_cache()
            rows.append(dataclasses.replace(row, share=1e3 * row.least / limits[limit] / row.median_ms))
    return limits, rows


def limit_rows(device: str, size: Size) -> Iterator[Row]:
    a = torch.randn(size.copied, device=device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    yield from timed(device, "limits", {"copy": lambda: b.copy_(a)}, 2.0 * a.nbytes)
    n = size.product
    x, y = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    p, q = (z.clamp(-3, 3).to(torch.float8_e4m3fn) for z in (x, y))
    one, rows, columns = (torch.ones(s, device=device) for s in ((), (n, 1), (1, n)))
    runs: dict[str, Callable[[], object]] = {
        "bf16": lambda: x @ y.t(),
        "fp8": lambda: matmul(p, q.t(), scale_a=one, scale_b=one),
        "fp8, scales of rows": lambda: matmul(p, q.t(), scale_a=rows, scale_b=columns),
        "fp8, fast sums": lambda: torch._scaled_mm(p, q.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    }
    if device == "cpu":
        del runs["fp8, fast sums"]
    yield from timed(device, "limits", runs, 2.0 * n**3)


def steps(device: str, size: Size) -> Iterator[tuple[Row, str]]:
    """Optimizer steps with one tensor per 64 M parameters, and with many small ones."""
    peers = ["torch-fp32-master", "torch-fp32-fused", "torch-bf16-fused"]
    shapes = {
        "large": (size.parameters, [*peers, *(f"collage-{v}" for v in VARIANTS)]),
        "many": (size.parameters // 10, [*peers, "collage-plus", "collage-light"]),
    }
    for shape, (num, names) in shapes.items():
        for name in names:  # one at a time, to fit into memory
            (t,) = optimizer.measure([name], optimizer.CASES, num, shape, _ROUNDS, device)
            yield (
                Row(
                    group=f"step, {shape} tensors",
                    name=name,
                    median_ms=t.median_ms,
                    quartiles_ms=(t.low_ms, t.high_ms),
                    least=float(t.bytes_moved_per_parameter * num),
                ),
                "copy",
            )


def casts(device: str, size: Size) -> Iterator[tuple[Row, str]]:
    """Compiled casts of a matrix in bf16 to e4m3fn, and decoding."""
    x = torch.randn(size.cast, size.cast, device=device, dtype=torch.bfloat16)
    runs: dict[str, Callable[[], object]] = {
        "torch, eager: clamp and cast": lambda: x.clamp(-448, 448).to(torch.float8_e4m3fn)
    }
    for scale in ("static", "l2", "max", "tensor", "row", "mx"):
        for axis in (-1, -2) if scale == "row" else (-1,):
            name = f"cast, {scale}" + {-2: " along columns"}.get(axis, "")
            state = torch.tensor(0.25, device=device) if scale == "static" else None
            runs[name] = partial(compiled(partial(_encoded, scale=scale, axis=axis)), x, state)
    for row in timed(device, "casts", runs, 3.0 * x.numel()):
        yield row, "copy"
    codes, scales = x.clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand(size.cast, 1, device=device) + 0.5
    decoding = {"decode and scale, compiled": partial(compiled(lambda c, s: decode(c) * s), codes, scales)}
    for row in timed(device, "casts", decoding, 3.0 * x.numel()):
        yield row, "copy"


def _encoded(x: Tensor, state: Tensor | None, *, scale: str, axis: int) -> Any:
    return tuple(encode_operand(x, OperandCast(scale=scale), axis=axis, state=state))


def layers(device: str, size: Size) -> Iterator[tuple[Row, str]]:
    """Forward and backward pass of a compiled layer; the wide one has the shape of a Llama's MLP."""
    for ratio, recipes in ((1.0, list(FP8_RECIPES)), (3.5, ["static", "tensor"])):
        inside, outside = size.width, int(size.width * ratio)
        x = torch.randn(size.tokens, inside, device=device, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(size.tokens, outside, device=device, dtype=torch.bfloat16) * 1e-3

        def step(layer: nn.Module, x: Tensor = x, g: Tensor = g) -> None:
            x.grad = None
            layer.zero_grad()
            layer(x).backward(g)

        make = partial(nn.Linear, inside, outside, bias=False, dtype=torch.bfloat16, device=device)
        runs: dict[str, Callable[[], object]] = {"torch bf16": partial(step, compiled(make()))}
        for recipe in recipes:
            layer = make()
            use_recipe(layer, FP8_RECIPES[recipe])
            calibrate(layer, partial(step, layer))
            runs[f"fp8, {recipe}"] = partial(step, compiled(layer))
        for recipe in ("tensorwise", "rowwise"):
            try:
                runs[f"torchao, {recipe}"] = partial(step, compiled(_torchao(make(), recipe, device)))
            except Exception as error:
                print(f"torchao, {recipe}: {type(error).__name__}: {error}")
        what = f"layer of {inside} x {outside} on {size.tokens} tokens"
        for row in timed(device, what, runs, 6.0 * size.tokens * inside * outside):
            yield row, "bf16" if row.name == "torch bf16" else "fp8"


def _torchao(layer: nn.Module, recipe: str, device: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device == "cpu")
    converted: nn.Module = convert_to_float8_training(nn.Sequential(layer), config=config)
    return converted


GROUPS: dict[str, Callable[[str, Size], Iterator[tuple[Row, str]]]] = {"casts": casts, "layers": layers, "steps": steps}


def compiled(function: Any) -> Any:
    """Compile for the first shapes; on a CPU the graph runs eagerly, because its compiler shows nothing about a GPU."""
    return torch.compile(function, dynamic=False, backend="inductor" if torch.cuda.is_available() else "aot_eager")


def timed(device: str, group: str, runs: Mapping[str, Callable[[], object]], least: float) -> Iterator[Row]:
    """A row for each run; those that fail are printed and left out."""
    working = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:  # whatever a compiler or driver raises is a result here
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        else:
            working[name] = run
    seconds = common.interleaved(working, _ROUNDS) if device == "cpu" else on_device(working, _ROUNDS)
    for name, values in seconds.items():
        low, median, high = (1e3 * v for v in common.quartiles(values))
        yield Row(group=group, name=name, median_ms=median, quartiles_ms=(low, high), least=least)


def on_device(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Device seconds of every run; runs alternate, after two warm-ups each."""
    swept = torch.empty(2**29, dtype=torch.int8, device="cuda")
    for run in runs.values():
        run()
        run()
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            swept.zero_()
            torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
            before.record()
            run()
            after.record()
            pairs[name].append((before, after))
        torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1e3 for a, b in events] for name, events in pairs.items()}


def table(result: dict[str, Any]) -> str:
    """A Markdown table per group."""
    limits = "; ".join(f"{name} {value / 1e12:.2f}" for name, value in result["limits"].items())
    groups = itertools.groupby(result["rows"], lambda r: str(r["group"]))
    tables = (common.markdown((group, "ms", "quartiles", "of the limit"), map(_cells, rows)) for group, rows in groups)
    return "\n".join([f"Limits of {result['gpu']}, in TB/s and TFLOP/s: {limits}\n", *tables])


def _cells(r: dict[str, Any]) -> tuple[str, ...]:
    low, high = r["quartiles_ms"]
    share = "" if r["share"] is None else f"{r['share']:.2f}"
    return r["name"], f"{r['median_ms']:.3f}", f"{low:.3f} to {high:.3f}", share


if __name__ == "__main__":
    main()
