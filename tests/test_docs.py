"""Every `lpconv` command in README and docs runs as it stands, in a folder where its names exist; so do programs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from tests.helpers.bench_in_process import without_processes
from tests.helpers.checkpoints import cli_environment
from tests.helpers.foreign_files import make_foreign
from tests.helpers.gguf_files import demo_with_merges
from tests.helpers.stores import offered

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "docs/cli.md", "docs/convert.md", "docs/probe.md", "docs/bench.md", "docs/export.md",
    "docs/finetune.md", "docs/methods/gptq.md", "docs/methods/recover.md", "docs/methods/entropy.md",
    "docs/methods/merge.md", "docs/methods/multipoint.md", "docs/methods/native.md", "docs/layouts.md",
    "docs/reference/layouts.md",
    "docs/first-ten-minutes.md", "docs/past-one-machine.md", "docs/sharded-training.md", "docs/object-stores.md",
    "docs/verify.md", "docs/methods/four-bits.md", "docs/llms.txt", "docs/pack.md",
    *(f"docs/skills/{name}/SKILL.md" for name in
      ("choose-a-format", "convert-and-gate", "fine-tune-with-twin", "judge-a-file")),
]  # fmt: skip
PROGRAMS = [
    "docs/reference/api.md", "docs/formats.md", "docs/probe.md", "docs/methods/adaptive.md", "docs/methods/halp.md",
    "docs/methods/lca.md", "docs/methods/loss-scaling.md", "docs/methods/multipoint.md", "docs/methods/native.md",
    "docs/methods/scalify.md", "docs/methods/unit.md", "docs/methods/four-bits.md",
]  # fmt: skip
# Names that stand for a source model, and for outputs of earlier commands.
SOURCES = ("bert-large", "llama", "MODEL")
OUTPUTS = ("PATH", "A", "B")
CODES = ["convert", "--format", "int4", "--granularity", "group:32", "--verify", "weights"]
ADAPTER = ["finetune", "--lora", "2", "--steps", "1", "--seq-len", "16", "--batch-size", "1", "--twin", "none"]
FOREIGN = {"llama-nvfp4": "ct NVFP4", "llama-fp8": "fp8", "llama-gptq": "gptq"}  # on the page of layouts
JOBS = "version: 1\njobs:\n  - {id: one, model: demo, format: fp16, output: batch-one}\n"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: str) -> list[str]:
    lines = [line for block in blocks(page, "[a-z]*") for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip().startswith("lpconv ")]


def commands_to_run(page: str) -> list[str]:
    """A page's commands, but for those that an earlier page has, output aside: they take long, and need nothing."""
    earlier = [_without_output(c) for p in PAGES[: PAGES.index(page)] for c in commands(p)]
    return [c for c in commands(page) if c.startswith("lpconv convert ") or _without_output(c) not in earlier]


def _without_output(command: str) -> str:
    return re.sub(r" -o \S+", "", command)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``s3://bucket``, which holds a model."""
    files = {f"llama-70b/{p.name}": p.read_bytes() for p in demo_checkpoint().iterdir()}
    with offered(monkeypatch, tmp_path, files):
        yield


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a conversion of ``MODEL`` wrote, beside ``CODES`` of 4 bits and an ``ADAPTER`` of them."""
    folder = tmp_path_factory.mktemp("converted")
    shutil.copytree(demo_checkpoint(), folder / "MODEL")
    command = ["convert", str(folder / "MODEL"), "--verify", "weights", "-o", str(folder / "output"), "-q"]
    assert CliRunner().invoke(app, command).exit_code == 0
    for source, options, name in (("MODEL", CODES, "CODES"), ("CODES", ADAPTER, "ADAPTER")):
        command = [options[0], str(folder / source), *options[1:], "-o", str(folder / name), "-q"]
        assert CliRunner().invoke(app, command).exit_code == 0
    return folder / "output"


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LPCONV_COMPILE", "never")  # compiling takes longer than these commands,
    without_processes(monkeypatch)  # and so does starting the processes of a bench
    for name in SOURCES:
        shutil.copytree(demo_checkpoint(), name)
    demo_with_merges(Path("smollm"))
    for name, layout in FOREIGN.items() if page == "docs/layouts.md" else ():
        make_foreign(layout, Path("llama"), Path(name))
    Path("jobs.yaml").write_text(JOBS)
    shutil.copy(ROOT / "README.md", "README.md")
    Path("text.txt").write_text("To be, or not to be, that is the question.\n" * 100)
    runner = CliRunner()
    for name in OUTPUTS:
        shutil.copytree(converted, name)
    for name in ("CODES", "ADAPTER"):
        shutil.copytree(converted.parent / name, name)
    found = commands_to_run(page)
    assert found
    for command in found:
        done = runner.invoke(app, [*shlex.split(command)[1:]])
        assert done.exit_code == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        for out in Path().glob("*-unit-*"):  # default outputs; the next command may write them again
            shutil.rmtree(out)


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would type them: a later one may use the names of an earlier one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    names: dict[str, object] = {}
    found = blocks(page, "python")
    assert found
    for program in found:
        exec(compile(program, page, "exec"), names)


@pytest.mark.parametrize("script", sorted((ROOT / "docs/examples").iterdir()), ids=lambda path: path.name)
def test_an_example(script: Path, tmp_path: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("# ")
    if "foreign" in script.name:
        shutil.copytree(demo_checkpoint(), tmp_path / "original")
        make_foreign("ct NVFP4", tmp_path / "original", tmp_path / "quantised")
    (tmp_path / "lpconv").write_text(f'#!/bin/sh\nexec {sys.executable} -m lpconv "$@"\n')
    (tmp_path / "lpconv").chmod(0o755)
    program = sys.executable if script.suffix == ".py" else "bash"
    environment = cli_environment(PATH=f"{tmp_path}:{os.environ['PATH']}", LPCONV_COMPILE="never")
    done = subprocess.run([program, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
