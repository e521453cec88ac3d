"""The layer table of docs/design: a package imports only from lower rows, never from its own row or above."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lpconv

ROOT = Path(lpconv.__file__).parent

# Row of each top-level module or package of lpconv; the same table as docs/design/README.md.
ROWS = {
    "version": 0, "errors": 0, "options": 0, "results": 0, "gates": 0, "lazy": 0, "stdout": 0,
    "formats": 0, "lookup": 0, "progress": 0, "data": 0, "machine": 0, "student": 0,
    "layers": 1, "report": 1, "shards": 1,
    "mcf": 2, "kernels": 2, "checkpoint": 2,
    "forms": 3,
    "scaled": 4, "optim": 4, "loss_scale": 4, "methods": 4, "models": 4,
    "hf": 5, "convert": 5, "probe": 5,
    "train": 6, "export": 6, "init": 6,
    "bench": 7, "doctor": 7,
    "batch": 8, "advise": 8,
    "extras": 9, "cli": 9,
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """Names of lpconv's own packages that the file imports, at top level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"lpconv.{a.name}" for a in node.names] if node.module == "lpconv" else [node.module]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("lpconv.")}
    return found & ROWS.keys()


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_layers(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert package in ROWS, f"{package} has no row in the layer table"
    row = ROWS[package]
    upward = {p for p in imports_of(path) - {package, "extras"} if ROWS[p] > row or (ROWS[p] == row and row > 0)}
    assert not upward, f"{path.relative_to(ROOT)} (row {row}) imports {sorted(upward)}"


def test_optional_code_is_reached_through_one_door() -> None:
    for path in modules():
        if path.relative_to(ROOT).parts[0] == "extras":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("lpconv.extras."), f"{path} imports {node.module}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {".".join(("lpconv", *p.relative_to(ROOT).with_suffix("").parts)): p for p in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                graph.setdefault(name, set()).update(found & files.keys())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_relative_imports() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} uses a relative import"


def test_nothing_imports_the_package_that_stands_on_top() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Import) and any(a.name == "lpconv" for a in node.names)), path


_RENDERERS = {"terminal", "html", "markdown", "drawing"}
_SHARED = {"document", "charts", "numbers", "printable"}


@pytest.mark.parametrize("path", sorted((ROOT / "report").glob("*.py")), ids=lambda p: p.stem)
def test_builders_of_documents_know_no_layout_and_renderers_no_kind(path: Path) -> None:
    imported = {
        node.module.split(".")[-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lpconv.report.", "rich", "jinja2"))
        if node.module
    }
    if path.stem in _RENDERERS:
        assert {name for name in imported if (ROOT / "report" / f"{name}.py").exists()} <= _SHARED | _RENDERERS
    else:
        assert not imported & (_RENDERERS | {"console", "text", "table", "jinja2"})


def test_the_table_in_the_docs_is_this_one() -> None:
    page = (ROOT.parent / "docs/design/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, flags=re.MULTILINE)
    documented = {name.strip("`/"): int(row) for row, names in rows for name in re.findall(r"`[\w/]+`", names)}
    assert documented == {
        name: row for name, row in ROWS.items() if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
    }
