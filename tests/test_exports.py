"""What is public stands in the `__init__` of a package, and everything that stands there exists."""

import importlib
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lpconv
from lpconv.convert import ConvertOptions

ROOT = Path(lpconv.__file__).parent
WITH_NAMES = {"hf.py", "loss_scale.py", "models/plugin.py"}  # public modules, and one that travels with outputs


def test_modules_leave_it_to_their_package_what_is_public() -> None:
    modules = [
        p for p in ROOT.rglob("*.py") if p.name != "__init__.py" and "\n__all__" in p.read_text(encoding="utf-8")
    ]
    assert {p.relative_to(ROOT).as_posix() for p in modules} == WITH_NAMES


PACKAGES = sorted(".".join(("lpconv", *p.parent.relative_to(ROOT).parts)) for p in ROOT.rglob("__init__.py"))
# Asked by the names of their modules.
WITHOUT_NAMES = {
    "lpconv.batch", "lpconv.cli", "lpconv.gguf", "lpconv.kernels", "lpconv.models", "lpconv.report",
    "lpconv.scaled.rules", "lpconv.storage",
}  # fmt: skip


def test_a_package_gives_its_public_names() -> None:
    wrong = []
    for name in PACKAGES:
        package = importlib.import_module(name)
        declared = getattr(package, "__all__", ())
        if bool(declared) == any(name == p or name.startswith(f"{p}.") for p in WITHOUT_NAMES):
            wrong.append(f"{name} has {'names' if declared else 'no names'}")
        modules = [public for public in declared if inspect.ismodule(getattr(package, public))]
        wrong += [f"{name}.{public} is a module" for public in modules if name != "lpconv"]
        if not set(declared) <= set(dir(package)):
            wrong.append(f"dir({name}) lacks some of its names")
        with pytest.raises(AttributeError, match="'nothing'"):
            _ = package.nothing
    assert wrong == []


def test_one_import_is_enough_and_its_calls_list_their_options(tmp_path: Path) -> None:
    calls = {"advise", "bench", "convert", "finetune", "inspect", "probe", "restore", "scaled", "verify"}
    code = "import lpconv, sys; print(*(n for n in dir(lpconv) if n[0] != '_'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == calls | {"load", "optim", "track", "False"}
    assert all(callable(getattr(lpconv, name)) for name in calls)
    assert not hasattr(lpconv.optim, "__signature__")
    assert {"recipe", "steps", "grad_accum", "gates"} <= inspect.signature(lpconv.finetune).parameters.keys()
    shown = inspect.signature(lpconv.convert)
    assert shown.parameters["format"].annotation == str | None
    assert shown.parameters["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert "\n        format: " in pydoc.render_doc(lpconv.convert, renderer=pydoc.plaintext)

    made = lpconv.convert("demo", tmp_path / "fp8", format=torch.float8_e4m3fn, exclude="*embed*", verify="none")
    assert "format=e4m3fn, " in repr(made)
    assert len(repr(made)) < 1000
    assert "<tr><th>format</th><td>e4m3fn</td></tr>" in made._repr_html_()
    assert lpconv.inspect(tmp_path / "fp8").layout == "lpconv"
    assert lpconv.verify(tmp_path / "fp8", against="demo").passed
    lpconv.restore(tmp_path / "fp8", str(tmp_path / "plain"))
    for words, named in (
        ({"formt": "e4m3fn"}, "formt"),
        ({"options": ConvertOptions(), "format": "e4m3fn"}, "format"),
        ({"model": None}, "model"),
        ({"model": 3}, "3"),
        ({"output": None}, "output"),
    ):
        with pytest.raises(lpconv.errors.UsageError, match=named):
            lpconv.convert(**{"model": "demo", "output": tmp_path / "other", **words})


def test_a_public_name_wins_over_the_module_it_comes_from_in_any_order() -> None:
    order = "import lpconv.formats.cast; from lpconv.formats import cast; from lpconv.formats.cast import check_cast; "
    other = "from lpconv.probe import track, Tracker; from lpconv.probe.track import model_loss; "
    code = order + other + "print(cast.__name__, track.__name__, check_cast.__name__, model_loss.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cast", "track", "check_cast", "model_loss"]


def test_packages_and_their_options_come_without_torch() -> None:
    lazy = [name for name in PACKAGES if name not in ("lpconv.hf", "lpconv.optim", "lpconv.scaled")]
    imports = ", ".join(name for name in lazy if not name.startswith("lpconv.scaled."))
    names = "from lpconv.convert import ConvertOptions; from lpconv.formats import FORMATS"
    code = f"import {imports}, sys; {names}; print({{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
