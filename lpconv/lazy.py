"""The public names of a package, each imported when it is asked for (the idea of SPEC 1 of Scientific Python).

Most packages hold modules that import torch beside tables that the command line needs to start. Importing a public
name from the package must not cost the one when the other is meant. A name may be that of the module it comes from,
as with `lpconv.formats.cast`; then the package gives the function, and `from lpconv.formats.cast import …` still works.
"""

import ast
import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        home = vars(self)["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = vars(self)[name] = getattr(importlib.import_module(home), name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule sets it here, which must not hide the public name it shares.
        if not (isinstance(value, ModuleType) and name in vars(self)["_homes"]):
            super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *vars(self)["_homes"]}


def lazily(package: str) -> list[str]:
    """Let `package` give what its source imports under `if TYPE_CHECKING`; returns the names, for `__all__`."""
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]  # as every loader of files does
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    vars(module)["_homes"] = {name.name: node.module for node in imports for name in node.names}
    module.__class__ = _Package
    return sorted(vars(module)["_homes"])
