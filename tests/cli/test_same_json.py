"""Every command says under `--json` what it always said of the demo: the keys, and the values that no machine changes.

`golden_json.txt` holds them; `LPCONV_GOLDEN=write pytest tests/cli/test_same_json.py -n 0` writes it anew, for a change
that is meant. A line is a key, with dots and `[]` for what lies inside, and the distinct values under it. A document
much like an earlier one is recorded as what differs: `as of` that one, and a key alone for one that is gone. Times,
sizes of memory, hardware, hashes, versions and fractions that a processor rounds its own way are recorded as types; so
is all that a measurement decides, which is most of what `advise` and `doctor` say.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lpconv.cli.main import app
from tests.helpers.bench_in_process import without_processes

GOLDEN = Path(__file__).with_name("golden_json.txt")
WRITING = os.environ.get("LPCONV_GOLDEN") == "write"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="recorded without a GPU")

_SHORT = "--steps 2 --batch-size 2 --seq-len 16"
_BENCH = (
    "--layers 1 --compile off --baseline bf16 --min-iters 3 --min-time 0 --rounds 3 --launches 1 --batch 1 --seq 16"
)
# In their order: a command may read what one before it wrote. How much of a document is recorded is said first.
COMMANDS = {
    f"lpconv {words} --json": recorded
    for recorded, words in (
        ("values", "inspect demo"),
        ("values", "inspect demo --stats"),
        ("values", "convert demo --dry-run"),
        ("values", "convert demo -o unit"),
        ("values", "convert demo --method scalify --format e4m3fn --granularity row -o scalify"),
        ("values", "convert demo --method collage -o collage"),
        ("values", "convert demo --method multipoint -o multipoint"),
        ("values", "convert demo --format e4m3fn --layout compressed-tensors --gate sqnr>=1 -o compressed"),
        ("values", "convert demo --method units"),
        ("values", "inspect collage"),
        ("values", "inspect compressed"),
        ("values", "verify unit"),
        ("values", "verify unit --against demo"),
        ("values", "verify compressed --against demo --level values"),
        ("values", "restore collage -o restored"),
        ("values", "init demo --reinit --width 64 --layers 1 -o fresh"),
        ("numbers", "probe demo --steps 1 --batch-size 2 --seq-len 16 -o probe"),
        ("numbers", "report probe --what-if e5m2"),
        ("values", f"finetune demo --dry-run {_SHORT} -o dry"),
        ("numbers", f"finetune demo --recipe unit-fp8 {_SHORT} --eval-batches 1 -o finetuned"),
        ("numbers", f"bench demo --method static,row --optimizer adamw,collage-plus {_BENCH} --save bench.json"),
        ("numbers", "report bench.json"),
        ("values", "report unit"),
        ("values", "report unit scalify"),
        ("types", "advise demo --for both --steps 5 --batch-size 2 --seq-len 16 --budget minutes=20 -o advice"),
        ("types", "report advice"),
        ("values", "batch jobs.yaml --dry-run"),
        ("values", "batch jobs.yaml"),
        ("types", "doctor"),
        ("numbers", "export onnx unit -o onnx"),
    )
}
_JOBS = """
version: 1
jobs:
  - {id: one, model: demo, method: unit, output: outputs/one}
  - {id: two, model: demo, method: collage, residual: int8, output: outputs/two}
"""

_MOST = 6  # distinct values of a key that are written down
_MEASURED = re.compile(
    r"(^|\.)(seconds|spent|versions|command|findings|workers|device|energy|peaks|verdicts|parts\.\w+|\w*memory_bytes|"
    r"\w*rss_bytes|disk\w*)(\.|\[|$)|_s$"
)
_FROM_WEIGHTS = re.compile(r"\.(absmax|rms|sqnr_db|min_sqnr_db|max_rel_error|scale)$")


def _lines(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a document, with its key."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _lines(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _lines(inner, f"{key}[]")
    else:
        yield key, value


def _said(key: str, value: Any, recorded: str) -> str:
    """A leaf as it is recorded."""
    kind = "null" if value is None else type(value).__name__
    if recorded == "types" or (_MEASURED.search(key) and value is not None):
        return f"<{kind}>"
    is_exact = recorded == "values" or key.startswith("options.")
    if isinstance(value, float):
        if recorded == "values" and _FROM_WEIGHTS.search(key):
            return f"{value:.4g}"
        return str(value) if is_exact and len(str(value)) <= 6 else "<float>"
    if isinstance(value, str):
        text = re.sub(r"\b[0-9a-f]{64}\b", "<sha256>", value)
        return json.dumps(re.sub(r"\b\d+\.\d+(e[+-]\d+)?" if is_exact else r"\b\d[\d,.]*(e[+-]\d+)?", "#", text))
    return str(value) if is_exact or kind != "int" or value in (0, 1) else "<int>"


def _summary(document: Any, recorded: str) -> list[str]:
    """Lines of the keys in a document, each with its distinct values in their order."""
    found: dict[str, dict[str, None]] = {}
    for key, value in _lines(document):
        found.setdefault(key, {})[_said(key, value, recorded)] = None
    for values in found.values() if recorded == "types" else ():
        if len(values) > 1:
            values.pop("<null>", None)  # whether any is missing is the machine's
    return [
        f"{key}: {', '.join(list(values)[:_MOST])}{f' and {len(values) - _MOST} others' if len(values) > _MOST else ''}"
        for key, values in sorted(found.items())
    ]


def _shortest(whole: list[str], earlier: dict[str, list[str]]) -> list[str]:
    """The lines, or what differs from those of an earlier command, if it is less than half as many."""
    keys = {line.partition(": ")[0] for line in whole}
    differences = [
        [f"as of {command}", *(key for line in said if (key := line.partition(": ")[0]) not in keys)]
        + [line for line in whole if line not in said]
        for command, said in earlier.items()
    ]
    return next((found for found in sorted(differences, key=len) if 2 * len(found) < len(whole)), whole)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each command printed, from one folder in which all run."""
    folder, threads = tmp_path_factory.mktemp("json"), torch.get_num_threads()
    (folder / "jobs.yaml").write_text(_JOBS)
    printed: dict[str, list[str]] = {}
    earlier: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LPCONV_COMPILE", "never")
        patch.setattr(torch.version, "cuda", None)  # recorded with a build for CPUs only
        without_processes(patch)
        torch.set_num_threads(1)
        for command, recorded in COMMANDS.items():
            done = CliRunner().invoke(app, command.split()[1:])
            document = json.loads(done.stdout.replace(str(folder), "."))
            lines = [f"exit code: {done.exit_code}", *_summary(document, recorded)]
            printed[command] = _shortest(lines, earlier)
            earlier[command] = lines
    torch.set_num_threads(threads)
    if WRITING:
        GOLDEN.write_text("\n".join(f"$ {c}\n" + "\n".join(lines) + "\n" for c, lines in printed.items()))
    return printed


def _golden() -> dict[str, list[str]]:
    blocks = GOLDEN.read_text().removesuffix("\n").removeprefix("$ ").split("\n\n$ ")
    return {command: lines for command, *lines in (block.split("\n") for block in blocks)}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_the_golden_one(command: str, documents: dict[str, list[str]]) -> None:
    assert documents[command] == _golden()[command]


def test_every_golden_block_has_its_command() -> None:
    assert list(_golden()) == list(COMMANDS)
