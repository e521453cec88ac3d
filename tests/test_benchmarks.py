"""The scripts of benchmarks/ start, and the tables that they generate are current. Tests do not import them."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.helpers.checkpoints import cli_environment
from tests.helpers.records import ROOT, recorded

HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module(name, run_name="__main__")
    except SystemExit as e:
        if e.code: print(name, e)
    except ImportError as e:
        if not e.name or e.name.split(".")[0] in ("benchmarks", "lpconv"): print(name, e)
    except Exception as e: print(name, repr(e))
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, env=cli_environment(), capture_output=True, text=True, check=False)


def test_scripts_show_their_help() -> None:
    """Except those whose packages are not installed, and the one that runs in an environment of its own."""
    scripts = [p for p in (ROOT / "benchmarks").rglob("*.py") if "__main__" in p.read_text(encoding="utf-8")]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in scripts if p.name != "peer_rounding.py"]
    done = run("-c", HELP, *names)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_generated_tables_are_current() -> None:
    done = run("-m", "benchmarks.tables")
    assert done.returncode == 0, f"run `python -m benchmarks.tables --write`: {done.stdout}{done.stderr}"


def test_all_weights_that_decoders_found_were_equal() -> None:
    rows = [r for r in recorded("bits")["rows"] if "refused" not in r]
    assert {r["layout"] for r in rows} == {"compressed-tensors", "mlx", "gguf", "onnx"}
    assert all(0 < r["read"] == r["equal"] <= r["weights"] for r in rows)


def test_tests_and_benchmarks_do_not_import_each_other() -> None:
    for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests")):
        assert [p for p in (ROOT / folder).rglob("*.py") if other in _imported(p)] == []


def _imported(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}
