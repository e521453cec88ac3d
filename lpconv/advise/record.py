"""The output folder of an advice: the record, a page, and the manifest that carries it out."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lpconv.advise.options import ADVICE_FILE, AdviseOptions, Budget
from lpconv.errors import InputError
from lpconv.options import command_words
from lpconv.plan.options import ConvertOptions
from lpconv.report.advise import advice_document
from lpconv.report.html import html
from lpconv.results import AdviceResult, AdviceRow, from_json, json_text
from lpconv.storage.contents import read_result
from lpconv.storage.partfile import write_small
from lpconv.storage.resolve import DEMO
from lpconv.storage.staging import Staging
from lpconv.train.options import FinetuneOptions

PAGE = "advice.html"
MANIFEST = "jobs.yaml"
_HEAD = "# Written by lpconv advise; `lpconv batch jobs.yaml` carries it out. Gates are the estimates.\n"
_SQNR_DB = 0.5  # allowance, since publishing compares only a sample of the weights
_MARGIN = 1.1  # allowance for metrics that depend on the number of threads


def _write_advice(directory: Path, result: AdviceResult, options: AdviseOptions) -> None:
    """Write the current result, each file atomically. The manifest is written once something is recommended."""
    write_small(directory / ADVICE_FILE, json_text(result))
    write_small(directory / PAGE, html(advice_document(result)))
    advised = {(r.purpose, r.row) for r in result.recommendations}
    if rows := [r for r in result.rows if (r.purpose, r.name) in advised]:
        write_small(directory / MANIFEST, manifest_text(result.name, rows, options))


@contextmanager
def save_results(
    directory: Path, options: AdviseOptions, show_partial: Callable[[AdviceResult], None]
) -> Iterator[Callable[[AdviceResult], None]]:
    """Context manager that yields a function to save each intermediate result; publishes the folder at the end.

    If the block is interrupted, the last result is published and passed to `show_partial`.
    """
    latest: list[AdviceResult] = []
    with Staging(directory, {"advise": directory.name}, force=options.force, marker=ADVICE_FILE) as staging:

        def keep(result: AdviceResult) -> None:
            latest[:] = [result]
            _write_advice(staging.directory, result, options)

        try:
            yield keep
        except Exception:
            raise
        except BaseException:  # interrupts
            for partial in latest:
                keep(partial)  # again, since the interrupt may have come while its files were written
                staging.publish()
                show_partial(partial)
            raise
        staging.publish()


def read_advice(path: Path) -> AdviceResult:
    """Read an advice from a file. Raises InputError if it contains none."""
    advice = read_result(AdviceResult, path, hint="pass the directory that `lpconv advise` wrote")
    if not 1e-99 < from_json(Budget, advice.options.get("budget")).quality < 1e99:
        raise InputError(f"`{path}` has no valid budget for quality", hint="run `lpconv advise` again")
    return advice


def gates_of(row: AdviceRow) -> list[str]:
    """Gates that hold for the measured row."""
    if row.purpose == "train":
        return [] if row.gap is None else [f"loss_gap_own<={_rounded_up(row.gap.high)}"]
    gates = [f"{metric}<={_rounded_up(max(value, 1e-9) * _MARGIN)}" for metric, value in row.figures.items()]
    if row.sqnr_db is not None and math.isfinite(row.sqnr_db):
        gates.insert(0, f"sqnr>={row.sqnr_db - _SQNR_DB:.1f}")
    return gates


def _rounded_up(value: float) -> str:
    """`value` rounded up to two significant digits."""
    if value == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return f"{math.ceil(round(value / unit, 6)) * unit:.2g}"  # rounded first, because 1.1 / 0.1 is slightly above 11


def command_for(model: str, row: AdviceRow, options: AdviseOptions) -> str:
    """The command that carries a row out, including gates."""
    record: type[Any] = ConvertOptions if row.purpose == "infer" else FinetuneOptions
    command = "convert" if row.purpose == "infer" else "finetune"
    return shlex.join(["lpconv", command, model, *command_words(record, _settings(row, options))])


def manifest_text(model: str, rows: Sequence[AdviceRow], options: AdviseOptions) -> str:
    """The manifest of the recommended rows, one job each."""
    document = {"version": 1, "jobs": [_job(model, row, options) for row in rows]}
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True)


def _job(model: str, row: AdviceRow, options: AdviseOptions) -> dict[str, Any]:
    kind = {} if row.purpose == "infer" else {"kind": "finetune"}
    job = {"id": row.purpose, **kind, "model": model, **_settings(row, options)}
    for key in ("model", "data", "calibrate"):
        path = os.path.expanduser(job.get(key, ""))
        if path != DEMO and os.path.exists(path):  # a folder of that name does not hide what is included
            job[key] = os.path.abspath(path)
    return job


def _settings(row: AdviceRow, options: AdviseOptions) -> dict[str, Any]:
    """Options of `convert` or `finetune` that carry a row out, without defaults."""
    asked = {"revision": options.revision, **row.settings}
    if row.purpose == "train":
        asked |= {name: getattr(options, name) for name in ("steps", "batch_size", "lr", "data", "seq_len", "task")}
    asked["gates"] = gates_of(row)
    return {name: value for name, value in asked.items() if value is not None and (name, value) != ("task", "auto")}
