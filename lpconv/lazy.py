"""Lazy imports of a package's public names, each on first use (the idea of SPEC 1 of Scientific Python).

Most packages hold modules that import torch next to tables that the command line needs at start-up. Importing such a
table from the package must not import torch. A public name may equal the name of its module, as in
`lpconv.formats.cast`: the package attribute is then the function, and `from lpconv.formats.cast import …` still works.
A package with a function of its own name, such as `lpconv.convert`, can be called like that function.
"""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__signature__" and self._call in vars(self)["_homes"]:
            return inspect.signature(getattr(self, self._call))
        home = vars(self)["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if home == self.__name__ or ("." not in self.__name__ and home.startswith(f"{self.__name__}.{name}.")):
            return importlib.import_module(f"{self.__name__}.{name}")
        value = vars(self)[name] = getattr(importlib.import_module(home), name)
        return value

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """The text of `help`: the package's own, and that of the function for which the package can be called."""
        own = vars(self)["__doc__"]
        called = getattr(self, self._call) if self._call in vars(self)["_homes"] else None
        return own if called is None else f"{own}\n\n{self._call}(...)\n\n{called.__doc__}"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the public function that has the name of the package, such as `lpconv.convert.convert`."""
        if self._call not in vars(self)["_homes"]:
            raise TypeError(f"module {self.__name__!r} is not callable")
        return getattr(self, self._call)(*args, **keywords)

    @property
    def _call(self) -> str:
        return self.__name__.rpartition(".")[2]

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule sets an attribute of the package, which must not hide a public name that is spelt the
        # same.
        if not (isinstance(value, ModuleType) and name in vars(self)["_homes"] and not hasattr(value, "__path__")):
            super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return {*(n for n in super().__dir__() if n.startswith("__")), *vars(self)["__all__"]}


def lazily(package: str) -> list[str]:
    """Make the names that `package` imports under `if TYPE_CHECKING` available lazily. Returns them, for `__all__`.

    `import *` stands for the public classes of a module.
    """
    module = sys.modules[package]
    blocks = (node for node in ast.parse(_source_of(package)).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    vars(module)["_homes"] = {name: node.module for node in imports for name in _names_of(node)}
    module.__class__ = _Package
    return sorted(vars(module)["_homes"])


def _names_of(statement: ast.ImportFrom) -> list[str]:
    names = [name.name for name in statement.names]
    return _CLASS.findall(_source_of(str(statement.module))) if names == ["*"] else names


def _source_of(module: str) -> str:
    return str(importlib.util.find_spec(module).loader.get_source(module))  # type: ignore[union-attr]  # loaders of files have it
