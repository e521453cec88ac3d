"""Writes docs/reference/cuda.md: every place in lpconv that asks for CUDA, and how far it has been tried.

python -m tests.cuda.cuda_page > docs/reference/cuda.md
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.cuda.cuda_rehearsals import LPCONV, REHEARSALS

HERE = Path(__file__).parent
ROOT = LPCONV.parent

# What makes a line one that a GPU takes otherwise than a CPU.
TERMS = re.compile(
    r"\bis_cuda\b|\bdevice\.type\b|\btorch\.cuda\b|scaled_mm|cudagraph|\btriton\b"
    r"|_(?:flash|efficient|cudnn)_attention(?!\w*_for_cpu)"
)
WORDS = re.compile(r"cuda(?::.*)?|graphs")  # as whole strings
NOT_CPU = re.compile(r"device\b.*[!=]= 'cpu'")

# Why no rehearsal gets to a function, by the start of its name and its file's. The longest match counts.
_HOST = "asks whether torch finds a GPU, and leaves the rest to torch or accelerate"
_ALLOCATOR = "reads the allocator of a real GPU"
_CLOCK = "waits for a real GPU or reads its clock"
UNTRIED = {
    "batch/task.py:": "names of GPUs",
    "bench/options.py:": "a name among options; `tests/bench/test_bench_cases.py`",
    "bench/memory.py:": _ALLOCATOR,
    "bench/models.py: check_memory": "chooses a word in a message",
    "bench/rows.py:": "a name in a table",
    "bench/run.py:": "refuses CUDA graphs on a CPU, and a missing GPU; `tests/bench/test_bench_cli.py`",
    "bench/runner.py:": _CLOCK,
    "bench/runner.py: CaseRunner.memory": _ALLOCATOR,
    "bench/worker.py: measure_peaks": _CLOCK,
    "bench/worker.py: Worker.prepare": "several GPUs; on CPUs `tests/bench/test_parallel.py`",
    "bench/": "takes a device by name; tests of bench run it on a CPU",
    "storage/source.py:": "refuses pickled tensors that are not on a CPU",
    "doctor.py:": "the name of a processor; `tests/doctor/test_doctor.py`",
    "kernels/compiled.py:": "compiled kernels need Triton, which needs a GPU",
    "kernels/histogram.py:": "the shape of counts depends on data",
    "models/coded.py:": "asks whether autocast is on; resident codes have only run on a CPU",
    "optim/base.py:": "a table of limits; `tests/optim/test_shared_state.py`, on the device meta",
    "optim/kernel.py: ": "a table of sizes, which `benchmarks.cross_compile` takes",
    "optim/base.py: LowPrecisionOptimizer": "counts steps, which fake tensors cannot do; its kernels are rehearsed by "
    "optimizer_steps",
    "probe/noise.py:": "the random state to put back; `tests/probe/test_noise.py` runs it on a CPU",
    "report/doctor.py:": "the name of a processor; `tests/doctor/test_doctor.py`",
    "scaled/model.py: Scaling.around_forward": "autocast, for adaptive scaling; `tests/scaled/test_adaptive.py`",
    "scaled/rules/": "a table; the rules in it are rehearsed by attention, and `tests/scaled/test_cuda_attention.py`",
    "train/": _HOST,
    "train/memory.py:": _ALLOCATOR,
}


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A function that asks for CUDA: the lines that do, by number."""

    file: str
    function: str
    lines: dict[int, str]


def branches() -> list[Branch]:
    """All of them, file by file."""
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for path in sorted(LPCONV.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for function, number in _asking(ast.parse(source), ""):
            found[str(path.relative_to(LPCONV)), function][number] = lines[number - 1].strip()
    return [Branch(file=file, function=function, lines=lines) for (file, function), lines in found.items()]


def _asking(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
    """(function, line) of the expressions inside `node` that ask for CUDA; names of modules and types do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.arg, ast.AnnAssign)) and not getattr(
            child, "value", None
        ):
            continue
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _asking(child, f"{function}.{child.name}".removeprefix("."))
            continue
        is_term = isinstance(child, ast.Attribute | ast.Name) and TERMS.search(ast.unparse(child))
        if is_term or (isinstance(child, ast.Compare) and NOT_CPU.search(ast.unparse(child))):
            yield function, child.lineno
            continue
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and WORDS.fullmatch(child.value):
            yield function, child.lineno
        yield from _asking(child, function)


def rehearse(folder: Path) -> tuple[dict[str, str | None], dict[tuple[str, int], list[str]]]:
    """What each rehearsal raised, and the rehearsals that reached each (file, line); in a process of its own."""
    own = {} if torch.version.cuda else {"LD_PRELOAD": str(build_guard(folder / "guard.so"))}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.cuda_rehearsals"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LPCONV_COMPILE": "never", "PYTHONPATH": paths, **own},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result = json.loads(done.stdout.splitlines()[-1])
    reached: dict[tuple[str, int], list[str]] = defaultdict(list)
    for file, line, rehearsal in result["reached"]:
        reached[file, line].append(rehearsal)
    return result["errors"], reached


# A build for CUDA looks for the devices that fake tensors name.
CAN_FAKE_GPU = not torch.version.cuda or torch.cuda.is_available()


def build_guard(library: Path) -> Path:
    """`library`, compiled from `guard.cpp` against this torch; about three seconds."""
    headers, libraries = Path(torch.__file__).parent / "include", Path(torch.__file__).parent / "lib"
    paths = [f"-I{headers}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", *paths]
    subprocess.run([*command, str(HERE / "guard.cpp"), "-o", str(library), "-lc10", "-ltorch_cpu"], check=True)
    return library


def row(branch: Branch, reached: dict[tuple[str, int], list[str]]) -> str:
    """A line of the table. A branch counts as rehearsed where each of its lines ran on the fake GPU."""
    ran = [reached.get((branch.file, number), []) for number in branch.lines]
    if all(ran):
        names = sorted({name for names in ran for name in names}, key=list(REHEARSALS).index)
        how = "with stand-ins: " if names == ["drivers_answers"] else "rehearsed: "
        tried = how + ", ".join(names)
    else:
        place = f"{branch.file}: {branch.function}"
        known = [start for start in UNTRIED if place.startswith(start)]
        tried = f"**not**: {UNTRIED[max(known, key=len)]}" if known else "**not**: NO REASON GIVEN"
    asks = "<br>".join(f"`{_short(text)}`" for text in branch.lines.values())
    return f"| {branch.file} | {branch.function or 'module'} | {asks} | {tried} |"


def _short(text: str) -> str:
    text = text.split("  # ")[0]
    return (text if len(text) <= 88 else text[:85] + "…").replace("|", "\\|").replace("`", "'")


def page(reached: dict[tuple[str, int], list[str]]) -> str:
    """The whole of docs/reference/cuda.md."""
    rows = [row(branch, reached) for branch in branches()]
    done, stood_in = (sum(f"| {how}: " in r for r in rows) for how in ("rehearsed", "with stand-ins"))
    intro = HEAD.format(done=done, stood_in=stood_in, total=len(rows), rehearsals=_rehearsals())
    return "\n".join([intro, "| file | function | asks | tried |", "|---|---|---|---|", *rows, ""])


def _rehearsals() -> str:
    return "\n".join(f"| {name} | {(f.__doc__ or '').strip().splitlines()[0]} |" for name, f in REHEARSALS.items())


HEAD = """# CUDA code, tested without a GPU

This page lists every function that needs a GPU, and how far tests reach it on a CPU. It is generated by
`python -m tests.cuda.cuda_page > docs/reference/cuda.md`; a test compares the two and runs every rehearsal. On a
machine with a GPU, run

```
python -m benchmarks.speed.gpu -o gpu
```

This script checks all products, casts and recipes, and times them. One H200 has run it: [all checks
passed](../measured.md#on-an-h200). Of the commands that ran there, `finetune --recover` failed, because its
scales stayed on the CPU; that is fixed.

Of {total} functions that ask for CUDA, {done} are rehearsed, and {stood_in} were tested with stand-ins for the
answers of a driver. A rehearsal runs lpconv's code on fake tensors of device `cuda`. These have shapes, strides,
dtypes and a device, and follow the rules that torch's CUDA ops check (for scaled products: one row-major and one
column-major operand, multiples of 16, shapes, strides and number of scales), but they hold no data.

Rehearsals show that all operands, gradients and graphs fit together on compute capability 9.0, also with odd
shapes, and how many products run in fp8. They do not show what a kernel computes, what else cuBLASLt refuses, or
how fast anything is. A torch built for CPUs cannot run autograd on such tensors, so `tests/cuda/guard.cpp` adds the
device that a CUDA build has on a machine without a GPU.

The first rehearsal found three errors, which are fixed: layers with one output and batches of one token had strides
that CUDA refuses; a batch of one token with row scales fell back to bf16; and compiled scaled models multiplied in
bf16.

| rehearsal | what it runs |
|---|---|
{rehearsals}

A function is rehearsed if every line of it that asks for CUDA ran. A line that asks twice counts once.
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        errors, lines = rehearse(Path(scratch))
    failed = {name: error for name, error in errors.items() if error}
    if failed:
        sys.exit("\n".join(f"{name}: {error}" for name, error in failed.items()))
    print(page(lines), end="")
