"""Every public name of a module stands in its `__all__`, and everything in `__all__` exists."""

import importlib
from pathlib import Path

import pytest

import lpconv

ROOT = Path(lpconv.__file__).parent
NAMES = sorted(
    ".".join(("lpconv", *p.relative_to(ROOT).with_suffix("").parts))
    for p in ROOT.rglob("*.py")
    if p.name not in ("__init__.py", "__main__.py")
)


@pytest.mark.parametrize("name", NAMES)
def test_exports(name: str) -> None:
    module = importlib.import_module(name)
    public = {
        n
        for n, value in vars(module).items()
        if not n.startswith("_") and getattr(value, "__module__", None) == name and hasattr(value, "__qualname__")
    }
    declared = set(getattr(module, "__all__", ()))
    assert public <= declared, f"not in __all__: {sorted(public - declared)}"
    assert all(hasattr(module, n) for n in declared)
