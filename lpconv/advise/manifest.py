"""jobs.yaml: the advice as a manifest of `lpconv batch`, whose jobs fail where what was foretold does not come true."""

import math
import os
from collections.abc import Sequence
from typing import Any

import yaml

from lpconv.advise.options import AdviseOptions
from lpconv.results import AdviceRow

MANIFEST = "jobs.yaml"
_HEAD = "# Written by lpconv advise; `lpconv batch jobs.yaml` carries it out. Gates are what was foretold.\n"
_SQNR_DB = 0.5  # where publishing compares a sample of the weights, its worst tensor may read a little better or worse
_MARGIN = 1.1  # of figures that the number of threads may change


def gates_of(row: AdviceRow) -> list[str]:
    """The conditions under which the advice held."""
    if row.purpose == "train":
        return [] if row.gap is None else [f"loss_gap_own<={_rounded_up(row.gap.high)}"]
    found = [f"{metric}<={_rounded_up(max(value, 1e-9) * _MARGIN)}" for metric, value in row.figures.items()]
    if row.sqnr_db is not None and math.isfinite(row.sqnr_db):
        found.insert(0, f"sqnr>={row.sqnr_db - _SQNR_DB:.1f}")
    return found


def _rounded_up(value: float) -> str:
    """Two significant digits, not below `value`."""
    if value == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return f"{math.ceil(round(value / unit, 6)) * unit:.2g}"  # rounded, since 1.1 / 0.1 is a little above 11


def manifest_text(model: str, rows: Sequence[AdviceRow], options: AdviseOptions) -> str:
    """The manifest of the rows that are recommended, one job each."""
    jobs = [_job(model, row, options) for row in rows]
    document = {"version": 1, "jobs": jobs}
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True)


def _job(model: str, row: AdviceRow, options: AdviseOptions) -> dict[str, Any]:
    name = os.path.abspath(model) if os.path.isdir(model) else model
    revision = {} if options.revision is None else {"revision": options.revision}
    if row.purpose == "infer":
        return {"id": "infer", "model": name, **revision, **row.settings, "gates": gates_of(row)}
    return {"id": "train", "kind": "finetune", "model": name, **revision, **row.settings, **_training(options),
            "gates": gates_of(row)}  # fmt: skip


def _training(options: AdviseOptions) -> dict[str, Any]:
    """What the runs were made of, as far as it is not the default."""
    settings: dict[str, Any] = {"steps": options.steps, "batch_size": options.batch_size, "lr": options.lr}
    if options.data is not None:
        is_file = os.path.exists(options.data)
        settings["data"] = os.path.abspath(options.data) if is_file else options.data
    if options.seq_len is not None:
        settings["seq_len"] = options.seq_len
    if options.task != "auto":
        settings["task"] = options.task
    return settings
