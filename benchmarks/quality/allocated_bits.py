"""Do sizes that are chosen for every tensor beat the same `--bits` for all of them, at equal bytes?

    OMP_NUM_THREADS=1 python -m benchmarks.quality.allocated_bits --work FOLDER --out FILE.json [--model M ...]

If an error in a tensor costs c · Σ error², the least cost in a sum of bits has steps of λ / sqrt(c). The entropy with
that step is the size of the tensor, a `--rule` for `lpconv convert --bits`. Known without a text are 1, the inputs of a
row, and 1 / rms of the weights; measured on 64 windows of the sample plays are mean squared inputs and gradients.
"""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.quality import peers
from benchmarks.quality.held_out import converted

ROUNDINGS = {"nearest": "", "gptq": " --rounding gptq --calibrate demo --calibration-tokens 8192"}
COSTS = ("same bits", "1", "inputs", "1/rms", "squared inputs", "squared gradients")


def costs(folder: Path, model: Path) -> dict[str, dict[str, Any]]:
    """The weights of the linear layers except the head, and what an error in each costs by each measure."""
    opened, found = lpconv.load(model, dtype=torch.float32), dict[str, dict[str, Any]]()
    layers = {n + ".weight": m for n, m in opened.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for name, layer in layers.items():
        rms = mean_square(layer.weight) ** 0.5
        found[name] = {"weight": layer.weight.detach(), "1": 1.0, "inputs": layer.in_features, "1/rms": 1 / rms}
        found[name] |= {"squared inputs": 0.0, "squared gradients": 0.0}
        layer.register_forward_pre_hook(partial(note, found[name]))
    for ids in json.loads(peers.calibration_file(folder, model, 0).read_text()):
        opened.zero_grad()
        (opened(input_ids=(window := torch.tensor([ids])), labels=window).loss * (len(ids) - 1)).backward()
        for name, layer in layers.items():
            found[name]["squared gradients"] += mean_square(layer.weight.grad)
    return found


def note(cost: dict[str, Any], _: Any, inputs: Any) -> None:
    cost["squared inputs"] += mean_square(inputs[0])


def mean_square(x: Any) -> float:
    return float(x.detach().square().mean())


def bits_of(weight: Tensor, step: float) -> float:
    """Entropy of the integers with a step."""
    codes = (weight / step).round().long().view(-1)
    share = (codes - codes.min()).bincount().double() / codes.numel()
    return min(max(-float(share.xlogy(share).sum()) / 0.6931471805599453, 1.51), 11.9)


def sizes(found: dict[str, dict[str, Any]], cost: str, bits: float) -> dict[str, float]:
    """Bits of every tensor, `bits` per weight together."""
    total, low, high = sum(c["weight"].numel() for c in found.values()), -40.0, 40.0
    for _ in range(30):
        middle = (low + high) / 2
        chosen = {n: bits_of(c["weight"], 2**middle / c[cost] ** 0.5) for n, c in found.items()}
        mean = sum(chosen[n] * c["weight"].numel() for n, c in found.items()) / total
        low, high = (middle, high) if mean > bits else (low, middle)
    return {n: b - mean + bits for n, b in chosen.items()}


def main() -> None:
    parser = common.parser(__doc__, work="where models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    args = parser.parse_args()
    rows = common.Rows(args.out, ("model", "rounding", "bits", "cost"), lambda: {"machine": common.machine()})
    with common.work_folder(args.work) as folder:
        (folder / "models").mkdir(exist_ok=True)
        for name in args.model:
            model = peers.model_at(folder, name)
            found, held_out = costs(folder, model), peers.HeldOut(folder, model)
            keys = itertools.product([name], ROUNDINGS, (3.0, 4.0, 4.5), COSTS)
            for _, rounding, bits, cost in (key for key in keys if not rows.has(*key)):
                chosen = {} if cost == COSTS[0] else sizes(found, cost, bits)
                rules = "".join(f" --rule {n}={b:.4f}" for n, b in chosen.items())
                shutil.rmtree(output := folder / "allocated", ignore_errors=True)
                converted(model, output, f"--bits {bits}{rules}{ROUNDINGS[rounding]}")
                row = {"model": name, "rounding": rounding, "bits": bits, "cost": cost}
                rows.put(row | {"bytes": peers.stored_bytes(output), "sizes": chosen} | held_out.compare(output))


if __name__ == "__main__":
    main()
