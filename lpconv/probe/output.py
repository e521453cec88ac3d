"""The folder that `lpconv probe` writes: the histograms, and a page about them."""

import json
from pathlib import Path

from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.partfile import write_small
from lpconv.errors import InputError
from lpconv.probe.histograms import ProbeResult
from lpconv.probe.options import PROBE_FILE
from lpconv.results import from_json, to_json

__all__ = ["find_probe", "read_probe", "write_output"]


def write_output(directory: Path, result: ProbeResult, page: str) -> None:
    """The record last, so that a folder with one is complete."""
    write_small(directory / "report.html", page)
    text = json.dumps(to_json(result), separators=(",", ":"), allow_nan=False)  # indented, it would be all white space
    write_small(directory / PROBE_FILE, text + "\n")


def find_probe(run: str) -> Path | None:
    """The record that `run` means, a folder of `lpconv probe` or the file itself; None where it is something else."""
    path = Path(run) / PROBE_FILE if Path(run).is_dir() else Path(run)
    if path.is_file() and (path.name == PROBE_FILE or read_json(path).get("kind") == "probe"):
        return path
    return None


def read_probe(path: Path) -> ProbeResult:
    """The record in a file; InputError where it is none."""
    document = read_json(path)
    if document.get("kind") != "probe":
        raise InputError(f"`{path}` is no record of a probe", hint="pass an output of `lpconv probe`")
    return from_json(ProbeResult, document)
