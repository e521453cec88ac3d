"""Time lpconv's kernels against torch's own operations and other libraries, on this machine.

    python -m benchmarks.speed.kernels                     # every group at full size
    python -m benchmarks.speed.kernels --only linear --size 1024 --rounds 5 --out kernels.json

Within a group all implementations alternate, so that a slow moment of the machine affects all of them. Reported are
median and quartiles over the rounds, after a warm-up run that also compiles. Speed-ups are ratios of medians to the
group's baseline. Peers that are not installed are listed and left out.
"""

import dataclasses
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import common
from lpconv.formats.cast import cast
from lpconv.formats.histogram import exponent_histogram_reference
from lpconv.kernels.decode import decode
from lpconv.kernels.histogram import exponent_histogram
from lpconv.kernels.linear import FP8_RECIPES, linear, use_recipe
from lpconv.kernels.matmul import matmul
from lpconv.kernels.quantise import encode, fake_quantise
from lpconv.probe.track import track


@dataclass(kw_only=True)
class Group:
    """Implementations of one job. `work` is the amount per run, in `unit`s, for the rate.

    `conclude` sums up the median times by name.
    """

    name: str
    baseline: str
    aim: str
    work: float
    unit: str
    conclude: Callable[[dict[str, float]], str] | None = None
    runs: dict[str, Callable[[], object]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of one implementation, in milliseconds."""

    group: str
    name: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    rate: float
    unit: str
    speedup: float


def main() -> None:
    """Measure, print and save."""
    parser = common.parser(__doc__)
    parser.add_argument("--size", type=int, default=2048, help="side of the square matrices (2048)")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each implementation (15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=sorted(GROUPS), nargs="+", default=list(GROUPS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    timings: list[Timing] = []
    for key in options.only:
        for group in GROUPS[key](options.size):
            timings += measure(group, options.rounds)
            show(group, [t for t in timings if t.group == group.name])
    capability = {"threads": options.threads, "capability": torch.backends.cpu.get_cpu_capability()}
    machine = common.machine("torchao", "unit-scaling", "gfloat", "ml_dtypes") | capability
    common.save({"schema_version": 1, "machine": machine, "timings": [asdict(t) for t in timings]}, options.out)


def measure(group: Group, rounds: int) -> list[Timing]:
    """Time all implementations, alternating, for `rounds` rounds."""
    seconds = common.interleaved(group.runs, rounds)
    base = statistics.median(seconds[group.baseline])
    return [timing(group, name, samples, base) for name, samples in seconds.items()]


def timing(group: Group, name: str, seconds: list[float], base: float) -> Timing:
    """The record of one implementation."""
    low, median, high = common.quartiles(seconds)
    return Timing(
        group=group.name, name=name, median_ms=median * 1e3, quartiles_ms=(low * 1e3, high * 1e3),
        rate=group.work / median, unit=group.unit, speedup=base / median,
    )  # fmt: skip


def show(group: Group, timings: list[Timing]) -> None:
    """Print one group as a table."""
    print(f"\n{group.name}   (aim: {group.aim})")
    for t in timings:
        low, high = t.quartiles_ms
        against = "baseline" if t.name == group.baseline else f"{t.speedup:7.2f} x"
        print(f"  {t.name:34s}{t.median_ms:10.2f} ms [{low:.2f}, {high:.2f}] {t.rate:9.2f} {t.unit:9s}{against}")
    for name in group.missing:
        print(f"  {name:34s}not installed, or not usable here")
    if group.conclude is not None:
        print("  " + group.conclude({t.name: t.median_ms for t in timings}))


def add_peers(group: Group, peers: dict[str, Callable[[], Callable[[], object]]]) -> Group:
    """Add the peers that can be imported and run, and list the others, whatever they raise."""
    for name, make in peers.items():
        try:
            run = make()
            run()
        except Exception:
            group.missing.append(name)
        else:
            group.runs[name] = run
    return group


def decoding(size: int) -> list[Group]:
    """fp8 codes to bfloat16."""
    return [decoding_group(name, size) for name in ("e4m3fn", "e5m2")]


def decoding_group(name: str, size: int) -> Group:
    """One format's codes to bfloat16."""
    codes = encode(torch.randn(size, size), name)
    out = torch.empty(size, size, dtype=torch.bfloat16)
    group = Group(
        name=f"decode {name} to bfloat16", baseline="torch .to(bfloat16)", aim="4 x", work=size**2 / 1e9, unit="Gelem/s"
    )
    group.runs = {
        "torch .to(bfloat16)": lambda: codes.to(torch.bfloat16),
        "lpconv decode": lambda: decode(codes),
        "lpconv decode(out=)": lambda: decode(codes, out=out),
        "bound: fill a new result": lambda: torch.empty_like(out).fill_(0),
        "bound: the product alone": lambda: out.mul_(1.0),
    }
    return add_peers(group, {"ml_dtypes astype": lambda: ml_dtypes_decode(codes, name)})


def ml_dtypes_decode(codes: Tensor, name: str) -> Callable[[], object]:
    """ml_dtypes' conversion of a numpy view of the codes."""
    import ml_dtypes

    array = codes.view(torch.uint8).numpy().view(getattr(ml_dtypes, f"float8_{name}"))
    return lambda: array.astype(ml_dtypes.bfloat16)


def rounding(size: int) -> list[Group]:
    """Values to e4m3fn and back."""
    return [rounding_group(dtype, size) for dtype in (torch.float32, torch.bfloat16)]


def rounding_group(dtype: torch.dtype, size: int) -> Group:
    """One dtype to e4m3fn and back."""
    x = torch.randn(size, size).to(dtype)
    out = torch.empty_like(x)
    group = Group(
        name=f"fake-quantise {short(dtype)} to e4m3fn",
        baseline="torch clamp, cast, cast",
        aim="5 x",
        work=size**2 / 1e9,
        unit="Gelem/s",
    )
    group.runs = {
        "torch clamp, cast, cast": lambda: x.clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype),
        "lpconv fake_quantise": lambda: fake_quantise(x, "e4m3fn"),
        "lpconv fake_quantise(out=)": lambda: fake_quantise(x, "e4m3fn", out=out),
        "lpconv stochastic(out=)": lambda: fake_quantise(x, "e4m3fn", rounding="stochastic", out=out),
        "lpconv cast (the reference)": lambda: cast(x, "e4m3fn"),
        "bound: copy to a new result": lambda: x.clone(),
    }
    if dtype == torch.bfloat16:
        wide = torch.empty(1 << 19)
        pieces = list(zip(x.view(-1).split(len(wide)), out.view(-1).split(len(wide)), strict=True))
        group.runs["bound: to float32 and back, in cache"] = lambda: through_float32(pieces, wide)
    add_peers(group, {"unit-scaling FPFormat.quantise": lambda: unit_scaling_rounding(x)})
    if dtype == torch.float32:
        add_peers(group, {"ml_dtypes astype": lambda: ml_dtypes_rounding(x), "gfloat": lambda: gfloat_rounding(x)})
    return group


def through_float32(pieces: list[tuple[Tensor, Tensor]], wide: Tensor) -> None:
    """The cost of converting bfloat16 to float32 and back, which any float32 arithmetic pays."""
    for x, out in pieces:
        out.copy_(wide[: len(x)].copy_(x))


def short(dtype: torch.dtype) -> str:
    """The dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def unit_scaling_rounding(x: Tensor) -> Callable[[], object]:
    """unit-scaling's simulated E4M3 (the fnuz variant)."""
    from unit_scaling.formats import FPFormat

    e4m3 = FPFormat(4, 3, "nearest")
    return lambda: e4m3.quantise(x)


def ml_dtypes_rounding(x: Tensor) -> Callable[[], object]:
    """To float8 and back in numpy."""
    import ml_dtypes

    array = x.numpy()
    return lambda: array.astype(ml_dtypes.float8_e4m3fn).astype("float32")


def gfloat_rounding(x: Tensor) -> Callable[[], object]:
    """gfloat's vectorised rounding."""
    from gfloat import formats, round_ndarray

    array = x.double().numpy()
    return lambda: round_ndarray(formats.format_info_ocp_e4m3, array, sat=True)


def encoding(size: int) -> list[Group]:
    """Values to fp8 codes."""
    x = torch.randn(size, size, dtype=torch.bfloat16)
    group = Group(
        name="encode bfloat16 to e4m3fn",
        baseline="torch clamp, cast",
        aim="no slower",
        work=size**2 / 1e9,
        unit="Gelem/s",
    )
    group.runs = {
        "torch clamp, cast": lambda: x.clamp(-448, 448).to(torch.float8_e4m3fn),
        "lpconv encode": lambda: encode(x, "e4m3fn"),
    }
    return [group]


def histograms(size: int) -> list[Group]:
    """Exponent histograms."""
    return [histogram_group(dtype, size) for dtype in (torch.float32, torch.bfloat16)]


def histogram_group(dtype: torch.dtype, size: int) -> Group:
    """Exponent histogram of one dtype. The baseline only counts exponents, which gives no exact rates."""
    x = torch.randn(size, size).to(dtype)
    group = Group(
        name=f"exponent histogram of {short(dtype)}",
        baseline="torch frexp, bincount",
        aim="as fast",
        work=size**2 / 1e9,
        unit="Gelem/s",
    )
    group.runs = {
        "torch frexp, bincount": lambda: torch.bincount(torch.frexp(x.float())[1].view(-1) + 200, minlength=400),
        "lpconv exponent_histogram": lambda: exponent_histogram(x),
        "lpconv reference": lambda: exponent_histogram_reference(x),
    }
    return group


def training_step(size: int) -> list[Group]:
    """Forward and both gradients of a Linear, size x size x size."""
    x, weight, grad = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(3))
    x.requires_grad_()
    weight.requires_grad_()

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> None:
        x.grad = weight.grad = None
        function(x, weight).backward(grad)

    group = Group(
        name=f"Linear training step, {size} cubed, bfloat16 outside",
        baseline="torch bfloat16",
        aim="fp8 within 1.5 x of bfloat16, per row 2 x; 3 x faster than the same recipe of peers",
        work=3 * 2 * size**3 / 1e9,
        unit="GFLOP/s",
    )
    group.runs = {"torch bfloat16": lambda: step(F.linear), "lpconv fp8, unit scale": lambda: step(linear)}
    for recipe in ("tensor", "row"):
        group.runs[f"lpconv fp8, {recipe}"] = recipe_step(recipe, x, weight, grad)
    peers = {
        "torchao tensorwise, emulate": lambda: torchao_step("tensorwise", x, weight, grad),
        "torchao rowwise, emulate": lambda: torchao_step("rowwise", x, weight, grad),
        "unit-scaling simulate_fp8, float32": lambda: unit_scaling_step(x, weight, grad),
    }
    return [add_peers(group, peers)]


def recipe_step(recipe: str, x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], object]:
    """lpconv's Linear with scales from amax."""
    layer = plain_linear(weight)
    use_recipe(layer, FP8_RECIPES[recipe])
    return rounding_step(layer, x, weight, grad)


def plain_linear(weight: Tensor) -> torch.nn.Linear:
    """torch's Linear with a copy of `weight`."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight.detach().clone()
    return layer


def torchao_step(recipe: str, x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], object]:
    """torchao's float8 Linear, emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = torch.nn.Sequential(plain_linear(weight))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config)
    return rounding_step(model, x, weight, grad)


def unit_scaling_step(x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], object]:
    """unit-scaling's simulation, which rewrites calls of F.linear in a graph and only takes float32."""
    from unit_scaling.transforms import simulate_fp8

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().float())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    return rounding_step(simulate_fp8(Plain()), x.detach().float().requires_grad_(), weight, grad.float())


def rounding_step(model: torch.nn.Module, x: Tensor, weight: Tensor, grad: Tensor) -> Callable[[], object]:
    """A training step of `model`; raises RuntimeError unless its error is that of fp8 products."""
    exact = F.linear(x.float(), weight.float())
    error = (model(x).float() - exact).norm() / exact.norm()
    if not 0.01 < error < 0.2:
        raise RuntimeError(f"relative error {error:.2g}: this is no fp8 product")

    def run() -> None:
        x.grad = None
        model.zero_grad()
        model(x).backward(grad)

    return run


def half_products(size: int) -> list[Group]:
    """float16 matrix products on the CPU."""
    a, b = torch.randn(size, size).half(), torch.randn(size, size).half()
    wide_a, wide_b = a.float(), b.float()
    group = Group(
        name=f"float16 product, {size} cubed",
        baseline="torch float16 mm",
        aim="10 x",
        work=2 * size**3 / 1e9,
        unit="GFLOP/s",
    )
    group.runs = {
        "torch float16 mm": lambda: a @ b,
        "lpconv matmul": lambda: matmul(a, b),
        "torch float32 mm, alone": lambda: wide_a @ wide_b,
    }
    return [group]


def tracking(size: int) -> list[Group]:
    """Overhead of `track` on steps of a small BERT, recorded and not recorded."""
    import transformers

    width = max(size // 4, 64)
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=8
    )
    model = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 2000, (8, 128))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    def tracked(every: int) -> Callable[[], None]:
        tracker = track(model, every=every)

        def run() -> None:
            with tracker:
                step()

        return run

    def conclude(ms: dict[str, float]) -> str:
        plain, recorded, passed = ms.values()
        return f"every 50th step recorded: {(recorded + 49 * passed) / 50 / plain:.3f} x the time   (aim: <= 1.01 x)"

    group = Group(
        name=f"training step of a 4-layer BERT, width {width}, 1024 tokens", baseline="plain",
        aim="recorded <= 1.15 x the time", work=1.0, unit="steps/s", conclude=conclude,
    )  # fmt: skip
    # In the third run only the warm-up step is recorded.
    group.runs = {"plain": step, "recorded": tracked(1), "tracked, not recorded": tracked(1_000_000)}
    return [group]


GROUPS: dict[str, Callable[[int], list[Group]]] = {
    "decode": decoding,
    "fake-quantise": rounding,
    "encode": encoding,
    "histogram": histograms,
    "linear": training_step,
    "half": half_products,
    "track": tracking,
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torchao")
    main()
