"""Files, Python names and options that README and docs mention exist."""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lpconv.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "docs/llms.txt", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, *sorted((ROOT / "benchmarks").rglob("README.md")), ROOT / ".github/CONTRIBUTING.md"]
INVENTED = {"--patience"}  # the option that docs/adding.md adds
OTHERS = (
    "cosign",
    "mlx_lm",
    "model_signing",
    "pip ",
    "pipx ",
    "pytest",
    "python ",
    "torchrun",
    "uvx ",
)  # commands that are not ours


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ()))
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


OPTIONS = {"--help", *_options(typer.main.get_command(app))}


def unknown_options(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if not any(word in line for word in OTHERS)]
    return {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)} - INVENTED - OPTIONS


def missing_files(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:lpconv|tests|benchmarks|docs)/[\w./*-]+)`", text)
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    absent = {f"{link}#{anchor}" for link, anchor in links if not _leads_somewhere(page, link, anchor)}
    return absent | {path for path in named if not list(ROOT.glob(path.rstrip("/")))}


def _leads_somewhere(page: Path, link: str, anchor: str) -> bool:
    """Whether the linked file exists and has the heading that the anchor names, if there is an anchor."""
    target = page.parent / link if link else page
    return target.exists() and (not anchor or anchor in _anchors(target))


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h.strip()).lower() for h in headings]
    return {re.sub(r"[^\w\- ]", "", w).replace(" ", "-") for w in words}


def missing_modules(text: str) -> set[str]:
    """Of the benchmarks that a page tells to run."""
    named = re.findall(r"-m (benchmarks(?:\.\w+)+)", text)
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    return {n for n, p in paths.items() if not (p.with_suffix(".py").exists() or (p / "__main__.py").exists())}


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


def unknown_names(text: str) -> set[str]:
    """Python names of lpconv that a page mentions or imports."""
    dotted = re.findall(r"`(lpconv(?:\.[A-Za-z_]\w*)+)", text)
    imported = [
        f"{module}.{name.strip()}"
        for module, names in re.findall(r"^from (lpconv[\w.]*) import ([\w, ]+)", text, flags=re.MULTILINE)
        for name in names.split(",")
    ]
    return {n for n in (*dotted, *imported) if not n.endswith((".json", ".default")) and not _exists(n)}


def test_what_pages_mention_exists() -> None:
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        options = unknown_options(text) if page in DOCS else set()  # benchmarks have options of their own
        if unknown := options | missing_files(page) | missing_modules(text) | unknown_names(text):
            found[str(page.relative_to(ROOT))] = unknown
    assert found == {}
