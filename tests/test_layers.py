"""The structure of lpconv: rows of packages as in docs/design, and no circles."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import lpconv

ROOT = Path(lpconv.__file__).parent

# Row of each top-level module or package of lpconv; the same table as docs/design/README.md.
ROWS = {
    "version": 0, "errors": 0, "options": 0, "results": 0, "gates": 0, "lazy": 0,
    "formats": 0, "lookup": 0, "summed": 0, "progress": 0, "data": 0, "machine": 0, "student": 0,
    "layers": 1, "shards": 1,
    "mcf": 2, "kernels": 2, "storage": 2,
    "forms": 3,
    "layouts": 4,
    "scaled": 5, "optim": 5, "loss_scale": 5, "methods": 5, "models": 5, "report": 5,
    "hf": 6, "inspect": 6, "probe": 6,
    "plan": 7,
    "workers": 8,
    "verify": 9,
    "convert": 10,
    "train": 11, "export": 11, "init": 11,
    "bench": 12, "doctor": 12,
    "batch": 13, "advise": 13,
    "cli": 14,
}  # fmt: skip
# Files of a subject that has one folder but needs several rows: each counts as a file of this package.
HOMES = {
    "gguf/__init__": "storage", "gguf/view": "storage", "gguf/read": "storage", "gguf/arranged": "storage",
    "gguf/blocks": "forms", "gguf/model": "models", "gguf/vocabulary": "models", "gguf/plan": "plan",
    "report/numbers": "lookup", "report/printable": "lookup",
}  # fmt: skip


def home_of(name: str) -> str:
    """The package or module of the layer table to which the module `name`, or a name in it, belongs."""
    parts = name.split(".")[1:]
    return HOMES.get("/".join(parts[:2]), parts[0])


@dataclass(frozen=True)
class Module:
    """A file of lpconv below its packages."""

    path: Path

    @property
    def name(self) -> str:
        return ".".join(("lpconv", *self.path.relative_to(ROOT).with_suffix("").parts))

    @property
    def package(self) -> str:
        return home_of(self.name)

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Those at top level and those inside functions."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    @cached_property
    def imported(self) -> set[str]:
        """Full names of what is imported from lpconv: modules, faces of packages, and names that may be modules."""
        found = {a.name for node in self.imports if isinstance(node, ast.Import) for a in node.names}
        for node in self.imports:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        return {f"{n}.__init__" if n in FACES else n for n in found if n.startswith("lpconv.")}

    @property
    def packages(self) -> set[str]:
        """Packages and modules of the layer table that are imported, but for the module's own."""
        return {home_of(name) for name in self.imported} & ROWS.keys() - {self.package}


FACES = {".".join(("lpconv", *p.parent.relative_to(ROOT).parts)) for p in ROOT.rglob("*/__init__.py")}
MODULES = [
    Module(p) for p in sorted(ROOT.rglob("*.py")) if p.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py")
]


def problems_of(module: Module) -> Iterator[str]:
    """What a module imports that it should not."""
    row = ROWS.get(module.package)
    if row is None:
        yield "its package has no row in the layer table"
        return
    upward = {p for p in module.packages if ROWS[p] > row or (ROWS[p] == row and row > 0)}
    yield from (f"of row {row} imports {p} of row {ROWS[p]}" for p in sorted(upward))
    if any(isinstance(node, ast.ImportFrom) and node.level for node in module.imports):
        yield "uses a relative import"
    if any(isinstance(node, ast.Import) and any(a.name == "lpconv" for a in node.names) for node in module.imports):
        yield "imports the package that stands on top"


_RENDERERS = {"terminal", "html", "markdown", "drawing"}
_SHARED = {"document", "charts", "numbers", "printable"}
_LIBRARIES = {"rich", "jinja2"}  # of the renderers


def problems_of_report(module: Module) -> Iterator[str]:
    """Builders of documents know no layout, and renderers no kind of result."""
    own = {name.split(".")[2] for name in module.imported if name.startswith("lpconv.report.")}
    sources = {(node.module or "").split(".")[0] for node in module.imports if isinstance(node, ast.ImportFrom)}
    kinds = {p.stem for p in (ROOT / "report").glob("*.py")} - _RENDERERS - _SHARED
    if module.path.stem in _RENDERERS:
        yield from (f"lays out documents and knows {kind}" for kind in sorted(own & kinds))
    else:
        laying_out = (own & _RENDERERS) | (sources & _LIBRARIES)
        yield from (f"builds documents and knows {name}" for name in sorted(laying_out))


def test_modules_import_downwards() -> None:
    found = [f"{m.name} {problem}" for m in MODULES for problem in problems_of(m)]
    found += [f"{m.name} {problem}" for m in MODULES if m.package == "report" for problem in problems_of_report(m)]
    page = (ROOT.parent / "docs/design/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, flags=re.MULTILINE)
    documented = {name.strip("`/"): int(row) for row, names in rows for name in re.findall(r"`[\w/]+`", names)}
    rows_of_files = {name: ROWS[home] for name, home in HOMES.items() if not name.endswith("__init__")}
    there = rows_of_files | {n: row for n, row in ROWS.items() if (ROOT / n).exists() or (ROOT / f"{n}.py").exists()}
    if documented != there:
        found.append(f"docs/design/README.md has other rows: {sorted(documented.items() ^ there.items())}")
    assert found == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {m.name for m in MODULES}
    graph = {m.name: m.imported & names - {m.name} for m in MODULES}
    TopologicalSorter(graph).prepare()  # CycleError names the modules
