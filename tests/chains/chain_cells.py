"""Every kind of checkpoint through every command: what each pair does, by doing it on one layer of the demo model.

A cell works, or is refused before the work with exit code 4 and nothing written. Anything else is an error of ours, and
raises here. `docs/reference/chains.md` is the table of the verdicts.
"""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import lpconv.hf
from lpconv.cli.main import app
from lpconv.results import PeakRecord
from tests.helpers.bench_in_process import without_processes
from tests.helpers.checkpoints import shallow_demo
from tests.helpers.foreign_files import make_foreign
from tests.helpers.gguf_files import rewrite_as_gguf

__all__ = ["COMMANDS", "SOURCES", "WORKS", "make", "read_page", "set_up", "verdict", "write_page"]

WORKS = "works"


def set_up(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No child processes, no compiler, a cache below `folder`, and a device whose speed is known."""
    patch.setenv("LPCONV_COMPILE", "never")
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    peaks = PeakRecord(bf16_flops=1e11, fp32_flops=1e10, fp8_flops=None, bytes_per_s=1e10)
    patch.setattr("lpconv.advise.study.measure_peaks", lambda device: peaks)
    without_processes(patch)


def _invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def _must(*words: object) -> Result:
    """A command that has to succeed."""
    done = _invoke(*words)
    assert done.exit_code == 0, f"{words}: exit {done.exit_code}\n{done.stdout}\n{done.stderr}"
    return done


def _words(settings: Mapping[str, object]) -> list[object]:
    """Settings of a manifest as options of the command line; one that is repeated there is a list here, and plural."""
    pairs = [
        pair
        for name, value in settings.items()
        for pair in ([(name.removesuffix("s"), v) for v in value] if isinstance(value, list) else [(name, value)])
    ]
    return [word for name, value in pairs for word in (f"--{name.removeprefix('budget_').replace('_', '-')}", value)]


def original(folder: Path) -> Path:
    """The plain checkpoint below `folder` from which all others there are made."""
    target = folder / "plain"
    if not target.exists():
        shallow_demo(target)
    return target


def _restore(target: Path) -> None:
    codes = make("unit e4m3fn", target.parent)
    _must("restore", codes, "-o", target, "-q")


def _save(target: Path) -> None:
    lpconv.hf.load(make("unit e4m3fn", target.parent)).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a model does not save its tokenizer
        shutil.copyfile(original(target.parent) / name, target / name)


def _fresh(target: Path) -> None:
    _must("init", original(target.parent), "--reinit", "-q", "-o", target)


def _foreign(layout: str) -> Callable[[Path], None]:
    def rewrite(target: Path) -> None:
        make_foreign(layout, original(target.parent), target)

    return rewrite


_FP16 = {"method": "unit", "format": "fp16"}
_TUNED = {"steps": 1, "seq_len": 16, "batch_size": 2, "eval_batches": 1, "twin": "none"}
# What a command makes of the plain checkpoint: the kind of job, and its settings.
_JOBS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "unit fp32": ("convert", {"method": "unit", "format": "fp32"}),
    "unit fp16": ("convert", _FP16),
    "unit e4m3fn": ("convert", {"method": "unit", "format": "e4m3fn"}),
    "scalify e5m2": ("convert", {"method": "scalify", "format": "e5m2"}),
    "unit 4 bits": ("convert", {"method": "unit", "budget_bits": 4.0}),
    "unit mx e2m1": ("convert", {"method": "unit", "format": "e2m1", "granularity": "mx"}),
    "unit 128x128": ("convert", {"method": "unit", "format": "e4m3fn", "granularity": "128x128"}),
    "unit group:32": ("convert", {"method": "unit", "format": "int4", "granularity": "group:32"}),
    "collage bf16": ("convert", {"method": "collage"}),
    "collage exact16": ("convert", {"method": "collage", "residual": "exact16"}),
    "collage int8": ("convert", {"method": "collage", "residual": "int8"}),
    "collage fp16": ("convert", {"method": "collage", "format": "fp16"}),
    "multipoint int4": ("convert", {"method": "multipoint"}),
    "compressed-tensors": ("convert", {"format": "e4m3fn", "layout": "compressed-tensors"}),
    "FP8_BLOCK": ("convert", {"format": "e4m3fn", "granularity": "128x128", "layout": "compressed-tensors"}),
    "MXFP4": ("convert", {"format": "e2m1", "granularity": "mx", "layout": "compressed-tensors"}),
    "NVFP4": ("convert", {"format": "e2m1", "granularity": "nvfp4", "layout": "compressed-tensors"}),
    "NVFP4, inputs too": (
        "convert",
        {"format": "e2m1", "granularity": "nvfp4", "layout": "compressed-tensors", "calibrate": "demo"},
    ),
    "W4A16": ("convert", {"format": "int4", "granularity": "group:32", "layout": "compressed-tensors"}),
    "fp8 of transformers": ("convert", {"format": "e4m3fn", "granularity": "128x128", "layout": "transformers"}),
    "mxfp8 of transformers": ("convert", {"format": "e4m3fn", "granularity": "mx", "layout": "transformers"}),
    "mixed": ("convert", {"format": "e2m1", "granularity": "mx", "rules": ["*mlp*=e4m3fn", "*o_proj*=keep"]}),
    "mixed-precision": (
        "convert",
        {"format": "e2m1", "granularity": "nvfp4", "layout": "compressed-tensors", "rules": ["*self_attn*=e4m3fn"]},
    ),
    "tuned unit-fp8": ("finetune", {"recipe": "unit-fp8", **_TUNED}),
    "tuned collage-bf16": ("finetune", {"recipe": "collage-bf16", **_TUNED}),
    "tuned plain": ("finetune", {"recipe": "unit-fp8", "save": "plain", **_TUNED}),
}
# Checkpoints that no single command makes of it.
_OTHERS: Mapping[str, Callable[[Path], object]] = {
    "plain": lambda target: None,
    "restored": _restore,
    "saved again": _save,
    "NVFP4 of others": _foreign("ct NVFP4"),
    "GGUF of others": lambda target: rewrite_as_gguf(original(target.parent), target),
    "fresh": _fresh,
}
SOURCES = (*_OTHERS, *_JOBS)


def make(source: str, folder: Path) -> Path:
    """The checkpoint of that kind, below `folder`."""
    target, plain = folder / source.replace(" ", "-"), original(folder)
    if target.exists():
        return target
    if source in _JOBS:
        kind, settings = _JOBS[source]
        _must(kind, plain, *_words(settings), "-q", "-o", target)
    else:
        _OTHERS[source](target)
    return target


def _values(path: Path, dtype: torch.dtype | None = torch.float32) -> dict[str, Tensor]:
    """The parameters that a checkpoint stands for, in fp32; opened with `dtype`, None for what its config says."""
    return {name: x.float() for name, x in lpconv.hf.load(path, dtype=dtype).state_dict().items()}


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _outcome(done: Result, written: Path | None) -> str:
    """What a command's exit says; AssertionError where it neither worked nor was refused in time."""
    if done.exit_code == 0:
        return WORKS
    said = f"exit {done.exit_code}\n{done.stdout}\n{done.stderr}\n{done.exception!r}"
    assert done.exit_code == 4, said
    assert written is None or not written.exists(), f"refused after it had begun to write\n{said}"
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    return "refused: " + error.removeprefix("error: ")


def _inspect(path: Path, out: Path) -> str:
    done = _invoke("inspect", path, "--json")
    assert json.loads(done.stdout)["tensors"]
    return _outcome(done, None)


def _verify(path: Path, out: Path) -> str:
    """Beside the source: what we converted converts to the same again, what others made has its values."""
    against = () if "tuned" in path.name or path.name == "fresh" else ("--against", path.with_name("plain"))
    level = () if "others" in path.name or not against else ("--level", "logits")
    return _outcome(_invoke("verify", path, *against, *level), None)


def _restored(path: Path, out: Path) -> str:
    done = _invoke("restore", path, "-o", out, "-q")
    if done.exit_code == 0:
        assert _same(_values(path), _values(out))
    return _outcome(done, out)


def _load(path: Path, out: Path) -> str:
    model = lpconv.hf.load(path)
    ids = torch.arange(8).unsqueeze(0)
    assert torch.isfinite(model(input_ids=ids).logits).all()
    return WORKS


def _load_and_save(path: Path, out: Path) -> str:
    model = lpconv.hf.load(path)
    try:
        model.save_pretrained(out)
    except ValueError as e:
        return f"refused: {e}"
    assert _same(_values(path), _values(out))
    return WORKS


def _probe(path: Path, out: Path) -> str:
    return _outcome(_invoke("probe", path, "--steps", 1, "--seq-len", 16, "-q", "-o", out), out)


def _tune(recipe: str) -> Callable[[Path, Path], str]:
    def tune(path: Path, out: Path) -> str:
        done = _invoke("finetune", path, "--recipe", recipe, *_words(_TUNED), "-q", "-o", out)
        if done.exit_code == 0:
            assert all(torch.isfinite(x).all() for x in _values(out).values())
            assert _same(_values(out), _values(out, dtype=None)), "opened as its config says, it loses digits"
        return _outcome(done, out)

    return tune


def _bench(path: Path, out: Path) -> str:
    effort = ("--min-iters", 1, "--min-time", 0, "--rounds", 1, "--launches", 1, "--seq", 16)
    return _outcome(_invoke("bench", path, "--format", "bf16", "--compile", "off", *effort, "-q", "--json"), None)


def _advise(path: Path, out: Path) -> str:
    """One candidate for inference; what else there is differs by settings only."""
    asked = ("--for", "infer", "--seq-len", 16, "--batch-size", 2)
    one = {"unit fp16": dict(_FP16)}
    with (
        mock.patch("lpconv.advise.infer.conversions", return_value=one),
        mock.patch("lpconv.advise.study.conversions", return_value=one),
    ):
        done = _invoke("advise", path, *asked, "-q", "--json", "-o", out)
    if done.exit_code == 0:
        (row,) = json.loads(done.stdout)["rows"]
        assert row["status"] in ("measured", "pruned")  # a model of 16 bits or fewer is not made smaller
    return _outcome(done, out)


def _export(path: Path, out: Path) -> str:
    return _outcome(_invoke("export", "onnx", path, "-o", out, "-q"), out)


def _convert_again(path: Path, out: Path) -> str:
    done = _invoke(
        "convert", path, "--method", "collage", "--residual", "exact16", "--verify", "weights", "-q", "-o", out
    )
    if done.exit_code == 0:
        assert _same(_values(path), _values(out))
    return _outcome(done, out)


def _batch(path: Path, out: Path) -> str:
    """A job writes the checkpoint, another one reads it by ``job:ID``."""
    out.mkdir()
    kind, settings = next((job for name, job in _JOBS.items() if name.replace(" ", "-") == path.name), ("", {}))
    plain = str(path.with_name("plain"))
    jobs: list[dict[str, Any]] = [{"id": "one", "kind": kind, "model": plain, **settings}] if kind else []
    model = "job:one" if kind else str(path)
    jobs.append({"id": "two", "kind": "probe", "model": model, "steps": 1, "seq_len": 16})
    manifest = out / "jobs.json"
    manifest.write_text(json.dumps({"version": 1, "jobs": jobs}))
    return _outcome(_invoke("batch", manifest, "-q"), None)


# What is done with a checkpoint (first argument), writing below the second, by its name in the table.
COMMANDS: Mapping[str, Callable[[Path, Path], str]] = {
    "inspect": _inspect,
    "verify": _verify,
    "restore": _restored,
    "load": _load,
    "load, save_pretrained": _load_and_save,
    "probe": _probe,
    "finetune unit-fp8": _tune("unit-fp8"),
    "finetune collage-bf16": _tune("collage-bf16"),
    "finetune fp32": _tune("fp32"),
    "finetune native-fp8": _tune("native-fp8"),
    "bench": _bench,
    "advise": _advise,
    "export onnx": _export,
    "convert again": _convert_again,
    "batch": _batch,
}


def verdict(command: str, path: Path, out: Path) -> str:
    """``works``, or ``refused:`` and the reason, with the checkpoint's own name and place as PATH."""
    found = COMMANDS[command](path, out)
    return found.replace(str(path), "PATH")


def write_page(verdicts: Mapping[tuple[str, str], str]) -> str:
    """docs/reference/chains.md: all kinds of checkpoints, all commands, and the pairs that are refused, by reason."""
    refused: dict[tuple[str, str], list[str]] = {}
    for command, source in itertools.product(COMMANDS, SOURCES):
        if verdicts[source, command] != WORKS:
            refused.setdefault((command, verdicts[source, command]), []).append(source)
    rows = [f"| {command} | {_some(sources)} | {reason} |" for (command, reason), sources in refused.items()]
    return _HEAD.format(sources="; ".join(SOURCES), commands="; ".join(COMMANDS)) + "\n".join(rows) + "\n"


def _some(sources: list[str]) -> str:
    others = [s for s in SOURCES if s not in sources]
    return "; ".join(sources) if len(sources) <= len(others) else f"all but {'; '.join(others)}"


def read_page(text: str) -> dict[tuple[str, str], str]:
    """The verdicts that a page of `write_page` holds."""
    sources, commands = (re.findall(rf"^- \*\*{name}\*\*: (.*)$", text, re.MULTILINE)[0].split("; ") for name in _LISTS)
    verdicts = dict.fromkeys(itertools.product(sources, commands), WORKS)
    for command, named, reason in re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)[1:]:
        listed = named.removeprefix("all but ").split("; ")
        left = listed if named == "; ".join(listed) else [s for s in sources if s not in listed]
        verdicts |= {(source, command): reason for source in left}
    return verdicts


_LISTS = ("Checkpoints", "Commands")
_HEAD = """# Every checkpoint with every command

Every kind of checkpoint below works with every command below, but for the exceptions in the table: the command
succeeds, and its output can be opened and has the right values. Generated by
`python -m tests.chains.chains_page > docs/reference/chains.md`, which tries all pairs on one layer of the demo model; a
test repeats one pair for every form and command.

- **Checkpoints**: {sources}
- **Commands**: {commands}

The exceptions are refused before anything is written, with exit code 4 or an exception in Python:

| command | checkpoints | verdict |
|---|---|---|
"""
