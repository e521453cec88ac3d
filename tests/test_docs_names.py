"""Files, Python names and options that README and docs mention exist."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lpconv.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "benchmarks/README.md", *sorted((ROOT / "benchmarks").glob("*/README.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
INVENTED = {"--patience"}  # the option that docs/adding.md adds
OTHERS = ("pip ", "pytest", "python ", "torchrun")  # commands that are not ours


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ()))
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


OPTIONS = {"--help", *_options(typer.main.get_command(app))}


@pytest.mark.parametrize("page", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_exist(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if not any(word in line for word in OTHERS)]
    named = {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)}
    assert named - INVENTED <= OPTIONS


@every_page
def test_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:lpconv|tests|benchmarks|docs)/[\w./*-]+)`", page.read_text())
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def _exists(name: str) -> bool:
    module = name
    rest: list[str] = []
    while module not in ("", "lpconv"):
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    else:
        found = importlib.import_module("lpconv")
    for part in rest:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@every_page
def test_python_names_exist(page: Path) -> None:
    text = page.read_text()
    dotted = re.findall(r"`(lpconv(?:\.[A-Za-z_]\w*)+)", text)
    imported = [
        f"{module}.{name.strip()}"
        for module, names in re.findall(r"^from (lpconv[\w.]*) import ([\w, ]+)", text, flags=re.MULTILINE)
        for name in names.split(",")
    ]
    names = {n for n in (*dotted, *imported) if not n.endswith((".json", ".default"))}
    assert sorted(n for n in names if not _exists(n)) == []
