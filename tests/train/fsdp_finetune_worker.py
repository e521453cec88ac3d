"""What the ranks of `test_fsdp_finetune` do."""

import os
import signal
from pathlib import Path

import torch.distributed as dist

from lpconv.progress import Silent
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune

STEPS = 4
UNIT = {"precision": "fp32", "method": "unit"}
COLLAGE = {"recipe": "unit-fp8-collage"}
NATIVE = {"recipe": "native-fp8"}  # of the folder `fresh`


def options(how: dict[str, str], **changes: object) -> FinetuneOptions:
    """Few and small steps, in batches that 1, 2 and 3 ranks share alike."""
    settings: dict[str, object] = {
        "steps": STEPS, "batch_size": 6, "seq_len": 16, "eval_every": 0, "eval_batches": 1, "twin": "none",
        "save_every": 2, "clip": 0.5,
    }  # fmt: skip
    return FinetuneOptions(arithmetic=arithmetic(**how), **settings | changes)  # type: ignore[arg-type]  # well typed


class _KillAt(Silent):
    """Ends the last rank as the kernel does when memory is short."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, amount: int, figures: str = "") -> None:
        self.step -= amount
        if self.step == 0 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(runs: dict[str, dict[str, str]]) -> None:
    """Each of the runs, into a folder of its name, sharded; it goes on with what is there."""
    for folder, how in runs.items():
        finetune(model_of(how), Path(folder), options(how, parallel="fsdp2", resume=True))


def model_of(how: dict[str, str]) -> str:
    """What a run trains; native recipes take a fresh model, in the folder of the ranks."""
    return "fresh" if how == NATIVE else "demo"


def train_until_killed(folder: str, how: dict[str, str]) -> None:
    """The last rank is killed in step 3; there is a checkpoint of step 2."""
    finetune("demo", Path(folder), options(how, parallel="fsdp2"), progress=_KillAt(3))
