"""Which scale for a group of 4-bit numbers keeps most: rules beside each other, on the matrices of trained models.

    PYTHONPATH=.:benchmarks python -m benchmarks.scale_rules [--model demo minilm]

10·log10(Σx² / Σ(x - x̂)²) over all matrices but embeddings. Integers: scales in bf16 of groups of 32, 64 and 128. MXFP4:
powers of two for 32 numbers. Everything is rounded in fp64 here, apart from what lpconv writes.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from granularity import minilm  # type: ignore[import-not-found]  # beside this file
from safetensors.torch import load_file
from torch import Tensor

from lpconv.data import demo_checkpoint
from lpconv.formats.cast import cast

_LEAST = 2.0**-120


def int4(x: Tensor, scale: Tensor) -> Tensor:
    """Squared errors of groups (last axis) by scales rounded to bf16."""
    s = scale.clamp_min(_LEAST).bfloat16().double()
    return (x - (x / s).round().clamp(-8, 7) * s).square().sum(-1)


def e2m1(x: Tensor, scale: Tensor) -> Tensor:
    return (x - cast(x / scale, "e2m1") * scale).square().sum(-1)


def _ends(x: Tensor, top: float, bottom: float) -> Tensor:
    return torch.maximum(x.amax(-1, keepdim=True) / top, -x.amin(-1, keepdim=True) / bottom)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp_min(_LEAST)


def _power(x: Tensor) -> Tensor:
    return torch.exp2(torch.log2(x).ceil())


def _best(errors: list[Tensor]) -> Tensor:
    return torch.stack(errors).amin(0)


INTEGERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "largest / 7": lambda x: int4(x, _largest(x) / 7),
    "largest / 7.5": lambda x: int4(x, _largest(x) / 7.5),
    "largest / 8": lambda x: int4(x, _largest(x) / 8),
    "ends / 7 and -8": lambda x: int4(x, _ends(x, 7, 8)),
    "ends / 7.5 and -8.5": lambda x: int4(x, _ends(x, 7.5, 8.5)),
    "best of 15 by squared error": lambda x: _best([int4(x, _largest(x) / (6.5 + i / 4)) for i in range(15)]),
}
MXFP4: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nothing clipped": lambda x: e2m1(x, _power(_largest(x) / 6)),
    "clipped by less than half a step": lambda x: e2m1(x, _power(_largest(x) / 7)),
    "the better of two by squared error": lambda x: _best([e2m1(x, _power(_largest(x) / 6) / f) for f in (1, 2)]),
}


def sqnr(weights: list[Tensor], size: int, rule: Callable[[Tensor], Tensor]) -> float:
    whole = [w.double().view(-1, size) for w in weights if w.shape[1] % size == 0]
    return 10 * math.log10(sum(float(x.square().sum()) for x in whole) / sum(float(rule(x).sum()) for x in whole))


def main() -> None:
    makers: Mapping[str, Callable[[], Path]] = {"demo": demo_checkpoint, "minilm": minilm}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=makers, default=list(makers))
    for model in parser.parse_args().model:
        files = Path(makers[model]()).glob("*.safetensors")
        stored = {n: x.float() for file in files for n, x in load_file(file).items()}
        weights = [x for n, x in stored.items() if x.ndim == 2 and "embed" not in n]
        for size in (32, 64, 128):
            for name, rule in INTEGERS.items():
                print(f"{model}: int4, groups of {size}, {name}: {sqnr(weights, size, rule):.2f} dB")
        for name, rule in MXFP4.items():
            print(f"{model}: MXFP4, {name}: {sqnr(weights, 32, rule):.2f} dB")


if __name__ == "__main__":
    main()
