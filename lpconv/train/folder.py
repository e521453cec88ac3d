"""The folder of a fine-tuning: what lies where, whose it is, and whether a run may begin or go on in it.

OUT/finetune.json          what was asked for; says that the folder is ours
OUT/metrics.jsonl          a row per step of the run (of the first seed)
OUT/runs/NAME/             the other runs' metrics, checkpoints to resume from, and run.json once a run is done
OUT/config.json …          the trained model
OUT/report.{json,html}     written last, so that a folder with them is complete
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.partfile import write_small
from lpconv.errors import OutputExistsError
from lpconv.results import ordered_json_text, to_json
from lpconv.train.options import FinetuneOptions

__all__ = [
    "MARKER",
    "REPORT",
    "begin_folder",
    "check_folder",
    "find_finetune",
    "remove_checkpoints",
    "run_folder",
]

MARKER, REPORT = "finetune.json", "report.json"
_RUNS = "runs"
# These say how a run goes or is judged, not what it is.
_FREE = {"resume", "force", "max_memory", "log_to", "gates"}


def check_folder(output: Path, model: str, options: FinetuneOptions) -> None:
    """Raises OutputExistsError for a folder that is there, unless `force` replaces one of ours or `resume` goes on
    with the same options."""
    if _is_free(output):
        return
    if not (output / MARKER).is_file():
        raise OutputExistsError(f"`{output}` exists and is no run of ours", hint="choose another --output")
    if options.resume:
        _check_same(output, _identity(model, options))
    elif not options.force:
        raise OutputExistsError(f"`{output}` exists", hint="--resume goes on with it, --force starts anew")


def _is_free(output: Path) -> bool:
    return not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir()))


def begin_folder(output: Path, model: str, options: FinetuneOptions) -> None:
    """Make the folder, or go on in it. Raises as `check_folder` does."""
    check_folder(output, model, options)
    if options.force and not options.resume and not _is_free(output):
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    write_small(output / MARKER, ordered_json_text(_identity(model, options)))


def _identity(model: str, options: FinetuneOptions) -> dict[str, Any]:
    fields = (f.name for f in dataclasses.fields(options) if f.name not in _FREE)
    return {"model": model, **{name: to_json(getattr(options, name)) for name in fields}}


def _check_same(output: Path, asked: dict[str, Any]) -> None:
    begun = read_json(output / MARKER)
    changed = sorted(k for k in {*asked, *begun} if asked.get(k) != begun.get(k))
    if changed:
        raise OutputExistsError(
            f"`{output}` was begun with other {', '.join(changed)}",
            hint="repeat the command of that run with --resume, or start anew with --force",
            details={"changed": changed},
        )


def run_folder(output: Path, role: str, seed: int) -> Path:
    """Where one run keeps its checkpoints."""
    return output / _RUNS / f"{role}-seed{seed}"


def remove_checkpoints(output: Path) -> None:
    """Once everything is done, nothing is left to resume."""
    for path in (output / _RUNS).glob("*/checkpoint-*"):
        shutil.rmtree(path)


def find_finetune(run: str) -> Path | None:
    """The report that `run` means, a folder of `lpconv finetune` or the file itself; None for anything else."""
    path = Path(run) / REPORT if Path(run).is_dir() else Path(run)
    return path if path.is_file() and read_json(path).get("kind") == "finetune" else None
