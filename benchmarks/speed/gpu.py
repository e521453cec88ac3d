"""Everything that needs a GPU, in one run: correctness first, then speed.

    python -m benchmarks.speed.gpu -o gpu       # writes gpu.json and gpu.md, and resumes an earlier gpu.json
    python -m benchmarks.speed.gpu --dry-run -o dry       # the same code on the CPU, at toy size

Needs torch, transformers, safetensors, numpy, typer and rich, and uses torchao and TransformerEngine if they are
installed. Needs no network. No bench starts after `--budget` seconds; the files list those left out.
"""

import copy
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.speed import gpu_kernels
from lpconv.bench.options import BenchOptions, Effort
from lpconv.bench.run import bench
from lpconv.doctor import try_products
from lpconv.errors import LpconvError
from lpconv.formats.codes import decode, encode
from lpconv.kernels.decode import decode as fast_decode
from lpconv.kernels.linear import FP8_RECIPES, calibrate, use_recipe
from lpconv.kernels.matmul import matmul
from lpconv.kernels.quantise import encode as fast_encode
from lpconv.optim import CollageAdamW
from lpconv.progress import Silent
from lpconv.report.bench import COLUMNS, reasons
from lpconv.results import BenchResult, BenchRow, from_json, to_json
from lpconv.results.doctor import ERROR, DeviceRecord
from lpconv.scaled import ScaledTensor, scaled

_PARTS = ("checks", "kernels", "benches")
_FP8 = ("e4m3fn", "e5m2")
# M, K, N; some need padding, and the strides of a single row or column matter
_SHAPES = ((16, 16, 16), (128, 96, 48), (17, 33, 65), (1, 64, 16), (32, 64, 1), (256, 4096, 1000))
_BF16_ERROR = 2.0**-8  # of a product with float32 sums and a bf16 result


@dataclass(frozen=True, kw_only=True)
class Check:
    """A correctness check and its result; `detail` holds the figure or the error."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One bench: sizes and methods with a common baseline."""

    model: str
    layers: int | None
    mode: str
    batch: int
    seq: int
    methods: tuple[str, ...]
    compiled: str = "blocks"


# The most informative first, because the budget may run out.
JOBS = (
    Job(
        model="llama-8b",
        layers=2,
        mode="train",
        batch=2,
        seq=4096,
        methods=("static", "torchao-tensorwise", "tensor"),
    ),
    Job(model="llama-8b", layers=2, mode="infer", batch=2, seq=4096, methods=("static", "torchao-tensorwise")),
    Job(model="bert-large", layers=None, mode="train", batch=32, seq=512, methods=("static", "torchao-tensorwise")),
    Job(model="bert-large", layers=None, mode="infer", batch=32, seq=512, methods=("static",)),
    Job(model="llama-1b", layers=4, mode="train", batch=4, seq=2048, methods=("static", "torchao-tensorwise")),
    Job(model="llama-8b", layers=2, mode="train", batch=2, seq=4096, methods=("row", "torchao-rowwise", "te")),
    # So small that kernel launches dominate the step: with CUDA graphs, and without.
    Job(model="bert-large", layers=None, mode="infer", batch=1, seq=128, methods=("static",), compiled="graphs"),
    Job(model="bert-large", layers=None, mode="infer", batch=1, seq=128, methods=("static",)),
    Job(model="llama-1b", layers=4, mode="infer", batch=4, seq=2048, methods=("static",)),
    Job(model="llama-8b", layers=2, mode="train", batch=2, seq=4096, methods=("delayed", "mx", "scalify")),
)
TOY_JOBS = (Job(model="demo", layers=1, mode="train", batch=1, seq=32, methods=("static", "te")),)


def main() -> int:
    """Run checks, kernels and benches, and write both files; returns 1 if a check failed."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("gpu"), help="name of both files, without suffix (gpu)"
    )
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no timing begins (480)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no GPU\nhint: --dry-run tries the script on the CPU", file=sys.stderr)
        return 4
    suite = Suite.begin(options.output, device)
    if not suite.checks and "checks" in options.parts:
        suite.checks = list(run_checks(device))
        suite.write()
    if suite.kernels is None and "kernels" in options.parts:
        suite.kernels = gpu_kernels.document(
            device, *gpu_kernels.measure(device, gpu_kernels.TOY if options.dry_run else gpu_kernels.FULL)
        )
        suite.write()
    jobs = TOY_JOBS if options.dry_run else JOBS
    for job in jobs if "benches" in options.parts else ():
        if str(job) not in suite.runs and suite.seconds <= options.budget:
            suite.runs[str(job)] = run_job(job, dry=options.dry_run)
            suite.write()
    suite.write(left_out=[job for job in jobs if str(job) not in suite.runs])
    print(options.output.with_suffix(".md").read_text(encoding="utf-8"))
    return 0 if all(c.passed for c in suite.checks) else 1


@dataclass(kw_only=True)
class Suite:
    """The results so far, written to both files after each step, so that an interrupted run can be resumed."""

    output: Path
    device: str
    checks: list[Check]
    kernels: dict[str, Any] | None
    runs: dict[str, BenchResult]
    seconds_before: float
    start: float = dataclasses.field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, output: Path, device: str) -> "Suite":
        """Load the results of an earlier run at `output`, if there are any."""
        path = output.with_suffix(".json")
        known = common.load(path) if path.exists() else {}
        return cls(
            output=output,
            device=device,
            checks=[Check(**c) for c in known.get("checks", ())],
            kernels=known.get("kernels"),
            runs={job: from_json(BenchResult, r) for job, r in known.get("runs", {}).items()},
            seconds_before=known.get("seconds", 0.0),
        )

    @property
    def seconds(self) -> float:
        """Seconds of this run and the earlier ones."""
        return self.seconds_before + time.perf_counter() - self.start

    def write(self, left_out: Sequence[Job] = ()) -> None:
        """Write both files."""
        document: dict[str, Any] = {
            "schema_version": 2,
            "kind": "gpu-suite",
            "device": torch.cuda.get_device_name() if self.device == "cuda" else self.device,
            "versions": common.versions("torch", "transformers", "triton", "torchao"),
            "seconds": round(self.seconds),
            "checks": [dataclasses.asdict(c) for c in self.checks],
            "kernels": self.kernels,
            "runs": {job: to_json(r) for job, r in self.runs.items()},
        }
        common.save(document, self.output.with_suffix(".json"))
        lines = ["# GPU suite", "", f"{document['device']}, {document['seconds']} s"]
        checks = ((c.name, "ok" if c.passed else "**failed**", c.detail) for c in self.checks)
        lines += ["", common.markdown(("check", "", ""), checks)]
        lines += [] if self.kernels is None else [gpu_kernels.table(self.kernels)]
        for run in self.runs.values():
            lines += [bench_table(run.rows), *(f"- {reason}" for reason in reasons(run.rows)), "", *run.notes]
        lines += ["", *(f"Left out, the budget was spent: {job}" for job in left_out)]
        self.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_job(job: Job, *, dry: bool) -> BenchResult:
    """Run one bench, with progress on stderr."""
    options = BenchOptions(
        model=job.model, layers=job.layers, formats=("fp8",), methods=job.methods, modes=(job.mode,),
        batches=(job.batch,), seqs=(job.seq,), compiled="off" if dry else job.compiled,
        baseline="bf16" if dry else "bf16+compile", device="cpu" if dry else "cuda",
        effort=Effort(
            min_iterations=4 if dry else 24, min_seconds=0 if dry else 1.5, rounds=2 if dry else 8, launches=1
        ),
        command="python -m benchmarks.speed.gpu",
    )  # fmt: skip
    try:
        return bench(options, progress=_Lines())
    except LpconvError as e:  # a job that fails becomes an empty run with a note
        return BenchResult(rows=(), notes=(f"{job}: {e.message}",))


class _Lines(Silent):
    def message(self, text: str) -> None:
        print(text, file=sys.stderr)


def run_checks(device: str) -> Iterator[Check]:
    """Run every check on its own: a failure does not hide the others."""
    for name, check in all_checks(device).items():
        try:
            passed, detail = check()
        except Exception as e:  # whatever a compiler or driver raises is a result here
            passed, detail = False, f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        yield Check(name=name, passed=passed, detail=detail)
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {detail}", file=sys.stderr)


def all_checks(device: str) -> dict[str, Callable[[], tuple[bool, str]]]:
    """The checks by name; each returns whether it passed, and a figure."""
    checks: dict[str, Callable[[], tuple[bool, str]]] = {}
    for name in _FP8:
        checks[f"cast to {name}: every bf16 value as on the CPU"] = partial(check_cast, name, device)
        checks[f"decode {name}: every code as on the CPU"] = partial(check_decode, name, device)
    for (m, k, n), scales in itertools.product(_SHAPES, ("none", "tensor", "row", "row and tensor")):
        checks[f"product {m} x {k} x {n}, scales: {scales}"] = partial(check_product, m, k, n, scales, device)
    for recipe in FP8_RECIPES:
        checks[f"Linear in fp8, {recipe}: compiled as eager"] = partial(check_compiled, recipe, device)
    for kind in ("tensor", "row"):
        checks[f"scaled fp8 model, operand scale {kind}: compiled as eager"] = partial(check_scaled, kind, device)
    checks["doctor: no scaled product that lpconv uses is an error"] = partial(check_layouts, device)
    checks["CollageAdamW: a step as on the CPU"] = partial(check_optimizer, device)
    return checks


def check_cast(name: str, device: str) -> tuple[bool, str]:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = fast_encode(x.to(device), name).view(torch.uint8).cpu()
    differing = int((codes != encode(x, name).view(torch.uint8)).sum())
    return differing == 0, f"{differing} of 65536 differ"


def check_decode(name: str, device: str) -> tuple[bool, str]:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(getattr(torch, f"float8_{name}"))
    expected, values = decode(codes, name, torch.float32), fast_decode(codes.to(device), torch.float32).cpu()
    same = torch.equal(expected.nan_to_num(1e9), values.nan_to_num(1e9))
    return same, "equal" if same else "different"


def check_product(m: int, k: int, n: int, scales: str, device: str) -> tuple[bool, str]:
    """Compare with float64, with the right operand in both layouts."""
    generator = torch.Generator().manual_seed(0)
    a = encode(torch.randn(m, k, generator=generator), "e4m3fn")
    b = encode(torch.randn(n, k, generator=generator), "e4m3fn")
    shapes = {"none": None, "tensor": ((), ()), "row": ((m, 1), (1, n)), "row and tensor": ((m, 1), ())}[scales]
    scale_a, scale_b = (None, None) if shapes is None else (torch.rand(s, generator=generator) + 0.5 for s in shapes)
    exact = decode(a, "e4m3fn", torch.float64) @ decode(b, "e4m3fn", torch.float64).t()
    for scale in (scale_a, scale_b):
        exact = exact if scale is None else exact * scale
    worst = 0.0
    for right in (b.to(device).t(), b.t().contiguous().to(device)):
        moved = (None if s is None else s.to(device) for s in (scale_a, scale_b))
        product = matmul(a.to(device), right, scale_a=next(moved), scale_b=next(moved)).double().cpu()
        worst = max(worst, float((product - exact).norm() / exact.norm()))
    return worst < _BF16_ERROR, f"relative error {worst:.1e}"


def check_compiled(recipe: str, device: str) -> tuple[bool, str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
    model = copy.deepcopy(plain).bfloat16()
    use_recipe(model, FP8_RECIPES[recipe])
    x = torch.randn(128, 256, device=device)
    for _ in range(2):  # delayed scaling needs a history
        calibrate(model, lambda: _gradients(model, model, x.bfloat16()))
    return _is_near(model, plain, x)


def check_scaled(kind: str, device: str) -> tuple[bool, str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128), nn.Linear(128, 16)).to(device)
    model = scaled(copy.deepcopy(plain), compute="fp8", operand_scale=kind, save_codes=False, strict=True)
    return _is_near(model, plain, torch.randn(128, 256, device=device))


def _is_near(model: nn.Module, plain: nn.Module, x: Tensor) -> tuple[bool, str]:
    """Whether the gradients of the compiled fp8 model are as close to fp32 as those of the eager one.

    They are not compared with each other: a compiler keeps fp32 where eager mode rounds to bf16, which flips codes in
    the next layer. On a CPU the graph is traced and runs eagerly, since compiling takes minutes and shows nothing about
    a GPU.
    """
    torch._dynamo.reset()
    exact = _gradients(plain, plain, x)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")
    runs = (_gradients(run, model, x.bfloat16()) for run in (model, compiled))
    eager_error, error = (float((gradients - exact).norm() / exact.norm()) for gradients in runs)
    return error < 1.1 * eager_error, f"relative error {error:.1e}, eager {eager_error:.1e}"


def _gradients(run: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor) -> Tensor:
    owner.zero_grad()
    run(x).float().square().mean().backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in owner.parameters() if p.grad is not None]
    return torch.cat([(g.dequantize() if isinstance(g, ScaledTensor) else g).float().flatten() for g in grads])


def check_layouts(device: str) -> tuple[bool, str]:
    """Whether `lpconv doctor` finds no error on this device."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    index = 0 if device == "cuda" else None
    record = DeviceRecord(kind=device, name="", index=index, capability=capability)
    tried = try_products(record)
    return all(p.level != ERROR for p in tried), "; ".join(f"{p.layout}: {p.level} {p.note}" for p in tried)


def check_optimizer(device: str) -> tuple[bool, str]:
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(1 << 16, generator=generator).bfloat16() for _ in range(2))

    def stepped(where: str) -> Tensor:
        parameter = nn.Parameter(start.to(where, copy=True))
        optimizer = CollageAdamW([parameter], lr=1e-2, betas=(0.9, 0.95), variant="plus")
        for _ in range(5):
            parameter.grad = grad.to(where)
            optimizer.step()
        return parameter.detach().float().cpu()

    error = float((stepped(device) - stepped("cpu")).norm() / start.float().norm())
    return error < 2.0**-9, f"relative difference {error:.1e}"


def bench_table(rows: Iterable[BenchRow]) -> str:
    """The rows of a bench as a Markdown table."""
    return common.markdown(tuple(COLUMNS), (tuple(cell(r) for cell in COLUMNS.values()) for r in rows))


if __name__ == "__main__":
    sys.exit(main())
