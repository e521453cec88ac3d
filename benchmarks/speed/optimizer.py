"""Time of one optimizer step: Collage next to the optimizers that it replaces.

    python -m benchmarks.speed.optimizer --parameters 30e6 --shapes few --rounds 15 --out optimizer.json

After a warm-up all cases alternate, so that a slow moment of the machine affects all of them. Steps run in place on
fixed gradients. `GB/s` divides the bytes that the case must move (each stored number read and written once, each
gradient read once, including the copies of an fp32 master) by the median time.

`few` is one tensor per 4 M parameters (`large`, for GPUs, per 64 M) and `many` one per 10 k: the first shows bandwidth,
the second the cost per tensor. Peers are timed if they are installed (`pip install lpconv[peers]`).
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import common
from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.storage import VARIANTS

TENSOR_SIZES = {"large": 64_000_000, "few": 4_000_000, "many": 10_000}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`make` takes fresh bf16 weights and gradients and returns a step; `bytes_moved` is per parameter."""

    bytes_moved: int
    make: Callable[[list[Tensor], list[Tensor]], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One row of the result; `low_ms` and `high_ms` are quartiles."""

    case: str
    num_parameters: int
    shapes: str
    median_ms: float
    low_ms: float
    high_ms: float
    min_ms: float
    ns_per_parameter: float
    gb_per_s: float
    bytes_moved_per_parameter: int


def collage(variant: str, arithmetic: str = "fused") -> Case:
    def make(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        params = with_gradients(weights, gradients)
        return LowPrecisionAdamW(params, betas=(0.9, 0.95), variant=variant, arithmetic=arithmetic).step

    stored = VARIANTS[variant].bytes_per_parameter(gradient=0)
    return Case(bytes_moved=2 * stored + 2, make=make)


def torch_adamw(dtype: torch.dtype) -> Case:
    def make(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        params = with_gradients([w.to(dtype) for w in weights], [g.to(dtype) for g in gradients])
        return torch.optim.AdamW(params, fused=True).step

    return Case(bytes_moved=7 * dtype.itemsize, make=make)


def torch_master() -> Case:
    """The baseline that Collage replaces: bf16 weights and gradients, fp32 masters, torch's fused AdamW."""

    def make(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        masters = with_gradients([w.float() for w in weights], [g.float() for g in gradients])
        optimizer = torch.optim.AdamW(masters, fused=True)
        master_gradients = [m.grad for m in masters if m.grad is not None]
        values = [m.detach() for m in masters]

        def step() -> None:
            torch._foreach_copy_(master_gradients, gradients)
            optimizer.step()
            torch._foreach_copy_(weights, values)

        return step

    return Case(bytes_moved=(2 + 4) + 7 * 4 + (4 + 2), make=make)


def torchao_adamw() -> Case:
    def make(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        from torchao.optim import _AdamW

        return _AdamW(with_gradients(weights, gradients), bf16_stochastic_round=True).step

    return Case(bytes_moved=2 * 6 + 2, make=make)


def optimi_kahan() -> Case:
    def make(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        from optimi import AdamW

        return AdamW(with_gradients(weights, gradients), lr=1e-3, kahan_sum=True).step

    return Case(bytes_moved=2 * 8 + 2, make=make)


CASES: dict[str, Case] = {
    "torch-fp32-master": torch_master(),
    "torch-fp32-fused": torch_adamw(torch.float32),
    "torch-bf16-fused": torch_adamw(torch.bfloat16),
    **{f"collage-{v}": collage(v) for v in VARIANTS},
    "collage-plus-paper": collage("plus", "paper"),
}
PEERS = {"torchao": ("torchao-adamw-sr", torchao_adamw()), "optimi": ("optimi-adamw-kahan", optimi_kahan())}


def with_gradients(weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    params = [w.requires_grad_() for w in weights]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    return params


def measure(
    names: list[str], cases: dict[str, Case], num: int, shapes: str, rounds: int, device: str
) -> Iterator[Timing]:
    size = TENSOR_SIZES[shapes]
    sizes = [min(size, num - start) for start in range(0, num, size)]
    steps = {}
    for name in names:
        weights = [(torch.randn(n, device=device) * 0.02).bfloat16() for n in sizes]
        gradients = [(torch.randn(n, device=device) * 0.001).bfloat16() for n in sizes]
        steps[name] = cases[name].make(weights, gradients)
        for _ in range(2):
            steps[name]()
    times = common.interleaved({name: partial(synchronised, step, device) for name, step in steps.items()}, rounds)
    for name in names:
        (low, median, high), moved = common.quartiles(times[name]), cases[name].bytes_moved
        yield Timing(
            case=name,
            num_parameters=num,
            shapes=shapes,
            median_ms=median * 1e3,
            low_ms=low * 1e3,
            high_ms=high * 1e3,
            min_ms=min(times[name]) * 1e3,
            ns_per_parameter=median / num * 1e9,
            gb_per_s=moved * num / median / 1e9,
            bytes_moved_per_parameter=moved,
        )


def synchronised(step: Callable[[], object], device: str) -> None:
    """Run a step and wait for the device."""
    step()
    if device != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    cases = CASES | dict(peer for module, peer in PEERS.items() if importlib.util.find_spec(module))
    parser = common.parser(__doc__)
    parser.add_argument("--parameters", type=lambda s: int(float(s)), default=30_000_000)
    parser.add_argument("--shapes", choices=TENSOR_SIZES, default="few")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    args = parser.parse_args()

    timings = list(measure(args.cases, cases, args.parameters, args.shapes, args.rounds, args.device))
    print(f"{'case':22} {'median ms':>10} {'quartiles':>19} {'ns/param':>9} {'GB/s':>7}")
    for t in timings:
        quartiles = f"{t.low_ms:.2f} to {t.high_ms:.2f}"
        print(f"{t.case:22} {t.median_ms:10.2f} {quartiles:>19} {t.ns_per_parameter:9.3f} {t.gb_per_s:7.1f}")
    machine = common.machine() | {"threads": torch.get_num_threads()}
    common.save({"machine": machine, "timings": [asdict(t) for t in timings]}, args.out)


if __name__ == "__main__":
    main()
