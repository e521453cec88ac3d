"""Every `lpconv` command in README and docs runs, as it stands, in a folder where its names exist."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from bench_in_process import without_processes
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "docs/cli.md", "docs/convert.md", "docs/probe.md", "docs/bench.md", "docs/export.md",
    "docs/finetune.md", "docs/methods/multipoint.md",
]  # fmt: skip
# Names that stand for a source model, and for outputs of earlier commands.
SOURCES = ("bert-large", "llama", "MODEL")
OUTPUTS = ("PATH", "A", "B")
JOBS = "version: 1\njobs:\n  - {id: one, model: demo, format: fp16, output: batch-one}\n"


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    return [line.split("  #")[0].strip() for b in blocks for line in b.splitlines() if line.startswith("lpconv ")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LPCONV_COMPILE", "never")  # compiling takes longer than these commands,
    without_processes(monkeypatch)  # and so does starting the processes of a bench
    for name in SOURCES:
        shutil.copytree(demo_checkpoint(), name)
    Path("jobs.yaml").write_text(JOBS)
    runner = CliRunner()
    for name in OUTPUTS:
        assert runner.invoke(app, ["convert", "MODEL", "--verify", "none", "-o", name, "-q"]).exit_code == 0
    found = commands(page)
    assert found
    for command in found:
        done = runner.invoke(app, [*shlex.split(command)[1:]])
        assert done.exit_code == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        for out in Path().glob("*-unit-*"):  # default outputs; the next command may write them again
            shutil.rmtree(out)
