"""Time every step of docs/first-ten-minutes.md as a newcomer takes it: a new environment, then each command in turn.

    python benchmarks/ten_minutes.py [--results benchmarks/results/ten-minutes.json]

The environment is made in a temporary folder, by the README's installation; commands run there, one after another in
one folder, and the first that fails ends it. Prints a table and writes the figures.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_HERE = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results/ten-minutes.json"
_INSTALL = "pip install -q torch==2.13.0 ."


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command and the seconds it took."""

    command: str
    seconds: float


def commands(page: Path) -> list[str]:
    """The lines of the page's blocks of code."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(command: str, folder: Path, environment: dict[str, str]) -> Step:
    print(f"$ {command}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return Step(command=command, seconds=round(time.perf_counter() - started, 2))


def table(steps: list[Step]) -> str:
    lines = ["| step | s |", "|---|---|", *(f"| `{s.command}` | {s.seconds:.1f} |" for s in steps)]
    return "\n".join([*lines, f"| all | {sum(s.seconds for s in steps):.0f} |", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    results: Path = parser.parse_args().results
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"PATH": f"{folder / 'venv/bin'}{os.pathsep}{environment['PATH']}", "HF_HUB_OFFLINE": "1"}
        (folder / "work").mkdir()
        shutil.copy(_HERE / "README.md", folder / "work")
        steps = [run("python3 -m venv venv", folder, environment), run(_INSTALL, _HERE, environment)]
        steps += [run(c, folder / "work", environment) for c in commands(_HERE / "docs/first-ten-minutes.md")]
    report = {"cores": os.cpu_count(), "load_average_at_start": load, "steps": [asdict(s) for s in steps]}
    results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(steps))


if __name__ == "__main__":
    main()
