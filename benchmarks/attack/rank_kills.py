"""Kill one of the ranks that train a sharded model, let torchrun begin again, and compare what comes out.

    python -m benchmarks.attack.rank_kills --work DIRECTORY --count 3 --out FILE.json

`lpconv finetune --parallel fsdp2 --resume` runs under `torchrun --max-restarts`. Once a checkpoint of a random step is
whole, one rank is ended by SIGKILL. Losses and the bytes of the weights have to be those of a run that nobody killed.
torchrun 2.13 hands ranks that begin again the store of those that died, addresses and all, unless a variable of its own
says otherwise.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from lpconv.storage.partfile import sha256_of

_STEPS, _EVERY = 12, 3
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_RECIPES = ("unit-fp8-collage", "scalify-fp8", "unit-fp16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and write the record."""
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    rng = random.Random(asked.seed)
    runs = [_trial(_RECIPES[n % len(_RECIPES)], rng, asked.work / str(n)) for n in range(asked.count)]
    record = {"schema_version": 1, "kind": "rank_kills", "seed": asked.seed, "ranks": 2, "steps": _STEPS, "runs": runs}
    common.save(record, asked.out)


def _trial(recipe: str, rng: random.Random, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    whole, killed = folder / "whole", folder / "killed"
    _begin(recipe, whole).wait()
    step, rank = rng.choice(range(_EVERY, _STEPS, _EVERY)), rng.randrange(2)
    process = _begin(recipe, killed)
    time_s = _kill_after(process, killed / f"runs/run-seed0/checkpoint-{step}/SHA256SUMS", rank)
    code = process.wait()
    found, expected = (_losses(x) for x in (killed, whole))
    return {
        "recipe": recipe,
        "killed_rank": rank,
        "after_checkpoint": step,
        "killed_after_s": time_s,
        "exit_code": code,
        "equal_losses": found == expected,
        "equal_weights": sha256_of(killed / "model.safetensors") == sha256_of(whole / "model.safetensors"),
    }


def _begin(recipe: str, output: Path) -> "subprocess.Popen[bytes]":
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    asked = ["--recipe", recipe, "--parallel", "fsdp2", "--steps", str(_STEPS), "--save-every", str(_EVERY), "--resume"]
    small = ["--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--twin", "none", "-q"]
    command = [*launcher, "-m", "lpconv", "finetune", "demo", *asked, *small, "-o", str(output)]
    return subprocess.Popen(command, env=os.environ | _ENVIRONMENT, stdout=subprocess.DEVNULL)


def _kill_after(process: "subprocess.Popen[bytes]", file: Path, rank: int) -> float:
    """Kill a rank once the file is there; how long that took."""
    started = time.perf_counter()
    while not file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before `{file.parent.name}`")
        time.sleep(0.02)
    ranks = [c for c in psutil.Process(process.pid).children() if c.environ().get("RANK") == str(rank)]
    ranks[0].send_signal(signal.SIGKILL)
    return round(time.perf_counter() - started, 1)


def _losses(output: Path) -> list[float]:
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    losses: list[float] = report["runs"][0]["losses"]["values"]
    return losses


if __name__ == "__main__":
    main()
