"""Inputs of `fuzz.py`: commands with damaged files, wrong options or unwritable outputs.

A `Trial` is one command line in a folder of its own. `outputs` are the places that must hold nothing finished where the
command fails.
"""

import itertools
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lpconv.cli.main import app
from tests.faults.material import BENCH, FORMS, LAYOUTS, PROBE, TUNE
from tests.faults.mutations import BYTES, odd_value

LONG = "x" * 300


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A command line, a description of what is wrong with it, and its outputs."""

    arguments: tuple[str, ...]
    wrong: str
    outputs: tuple[Path, ...] = ()
    file_bytes: int | None = None  # no file may become larger, as on a full disk


# What makes a trial of the sound files (first folder) in an empty folder (second).
Attack = Callable[[random.Random, Path, Path], Trial]


def _copied(material: Path, folder: Path, *names: str) -> None:
    for name in names:
        if (material / name).is_dir():
            shutil.copytree(material / name, folder / name)
        else:
            shutil.copyfile(material / name, folder / name)


def _harm(rng: random.Random, path: Path) -> str:
    """Damage a file in place, and describe the damage."""
    sound = path.read_bytes()
    if rng.random() < 0.05:
        path.unlink()
        return f"{path.name} is missing"
    if rng.random() < 0.05:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    if rng.random() < 0.05:
        path.write_bytes(b"")
        return f"{path.name} is empty"
    is_json = path.suffix == ".json"
    damage = odd_value if is_json and rng.random() < 0.7 else rng.choice(BYTES)
    path.write_bytes(damage(rng, sound))
    return f"{path.name}: {damage.__name__}"


def _on_a_checkpoint(
    rng: random.Random, name: str, only: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A command that reads the checkpoint `name`, and its outputs; slow commands are rare."""
    form = FORMS[rng.choice(list(FORMS))]
    recipe = rng.choice(("unit-fp8", "collage-bf16", "fp32"))
    level = rng.choice(("none", "weights", "auto", "logits"))
    commands: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = [
        (40, ("convert", name, *form, "--verify", level, "-q", "-o", "OUT"), ("OUT",)),
        (15, ("convert", name, *form, "--dry-run"), ("OUT",)),
        (15, ("inspect", name), ()),
        (10, ("inspect", name, "--stats", "-q"), ()),
        (12, ("probe", name, *PROBE, "-o", "OUT", *(["--calibrate"] if rng.random() < 0.2 else [])), ("OUT",)),
        (6, ("finetune", name, "--recipe", recipe, *TUNE, "-o", "OUT"), ("OUT",)),
        (4, ("init", name, "--reinit", "-q", "-o", "OUT"), ("OUT",)),
        (4, ("verify", name, "--against", name, "--level", "values", "-q"), ()),
        (1, ("export", "onnx", name, "-q", "-o", "OUT"), ("OUT",)),
        (1, ("bench", name, *BENCH), ()),  # in processes of its own, that import torch
    ]
    weights = [w if not only or a[0] in only else 0 for w, a, _ in commands]
    _, arguments, outputs = rng.choices(commands, weights)[0]
    return arguments, outputs


def _trial(
    rng: random.Random, folder: Path, arguments: Sequence[str], wrong: str, outputs: Sequence[str] = ()
) -> Trial:
    as_json = ("--json",) if rng.random() < 0.3 else ()
    return Trial(arguments=(*arguments, *as_json), wrong=wrong, outputs=tuple(folder / o for o in outputs))


def damaged_checkpoint(*kinds: str, files: Sequence[str], only: Sequence[str] = ()) -> Attack:
    """Damage a file of a checkpoint; `only` names the commands that read it."""

    def attack(rng: random.Random, material: Path, folder: Path) -> Trial:
        name = rng.choice(kinds)
        _copied(material, folder, name)
        there = sorted(p for f in files for p in (folder / name).glob(f))
        wrong = _harm(rng, rng.choice(there))
        arguments, outputs = _on_a_checkpoint(rng, name, only)
        return _trial(rng, folder, arguments, wrong, outputs)

    return attack


def damaged_output(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Damage a file of one of our outputs; the source is valid."""
    name = rng.choice((*FORMS, "restored", "tuned", "unequal", "fresh"))
    _copied(material, folder, name, "llama")
    there = sorted(p for p in (folder / name).rglob("*") if p.is_file() and p.suffix not in (".html", ".md"))
    wrong = f"{name}: {_harm(rng, rng.choice(there))}"
    if rng.random() < 0.25:
        arguments, outputs = _on_a_checkpoint(rng, name)
        return _trial(rng, folder, arguments, wrong, outputs)
    level = rng.choice(("hash", "weights", "logits"))
    commands = [
        (("verify", name), ()),
        (("verify", name, "--against", "llama", "--level", level, "-q"), ()),
        (("restore", name, "-o", "OUT", "-q"), ("OUT",)),
        (("report", name), ()),
        (("report", name, "--html", "page.html"), ("page.html",)),
        (("report", name, f"{name}/report.json"), ()),
    ]
    arguments, written = rng.choice(commands)
    return _trial(rng, folder, arguments, wrong, written)


def damaged_result(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Damage a record, a manifest or a journal."""
    name, files, commands = rng.choice(_RESULTS)
    _copied(material, folder, name, *(["llama"] if name not in ("llama", "batch") else []), "sharded")
    path = folder / name
    there = sorted(p for f in files for p in path.glob(f)) or [path]
    wrong = f"{name}: {_harm(rng, rng.choice(there))}"
    arguments = rng.choice(commands)
    outputs = [b for a, b in itertools.pairwise(arguments) if a in ("--html", "-o") and not (folder / b).exists()]
    return _trial(rng, folder, arguments, wrong, outputs)


_RESULTS: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, ...]]]] = (
    ("unit", ("report.json",), [("report", "unit"), ("report", "unit", "--html", "p.html"),
                                ("report", "unit", "unit")]),
    ("probe", ("probe.json",), [("report", "probe"), ("report", "probe", "--what-if", "e5m2"),
                                ("report", "probe", "--html", "p.html")]),
    ("probe", ("calibration.json",), [("report", "probe"), ("report", "probe", "--html", "p.html")]),
    ("tuned", ("report.json",), [("report", "tuned"), ("report", "tuned", "--html", "p.html")]),
    ("stopped", ("finetune.json", "metrics.jsonl", "runs/*/*.json*", "runs/*/checkpoint-*/*"),
     [("finetune", "llama", "--recipe", "bf16", *TUNE, "--save-every", "1", "-o", "stopped", "--resume")]),
    ("bench.json", (), [("report", "bench.json"), ("report", "bench.json", "--html", "p.html"),
                        ("bench", "nosuch", "--compare", "bench.json")]),
    ("half.partial", ("journal.jsonl", "*.safetensors"),
     [("convert", "sharded", "--verify", "weights", "-q", "-o", "half", "--resume")]),
    ("batch", ("jobs.json", "jobs.lock*", "*.lock*"), [("batch", "batch/jobs.json", "--dry-run"),
               ("batch", "batch/jobs.json", "--resume", "-q"),
               ("batch", "batch/jobs.json", "--locked", "--resume", "-q")]),
    ("batch", ("jobs.yaml",), [("batch", "batch/jobs.yaml", "--dry-run"), ("batch", "batch/jobs.yaml", "-q")]),
    ("batch", ("jobs.toml",), [("batch", "batch/jobs.toml", "--dry-run"), ("batch", "batch/jobs.toml", "-q")]),
)  # fmt: skip


def damaged_data(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Damage the text for training or probing."""
    _copied(material, folder, "llama", "data")
    path = folder / "data" / rng.choice(("x.txt", "x.jsonl", "x.csv", "x.parquet"))
    wrong = _harm(rng, path)
    data = ("--data", str(path.relative_to(folder)))
    task = ("--task", "classification") if rng.random() < 0.3 else ()
    tune = ("finetune", "llama", "--recipe", "fp32", *TUNE, "-o", "OUT", *data, *task)
    arguments = rng.choice((tune, ("probe", "llama", *PROBE, "-o", "OUT", *data)))
    return _trial(rng, folder, arguments, wrong, ("OUT",))


def vocabulary(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Use a tokenizer with more tokens than the model, or change the vocabulary size in the config."""
    name = "narrow"
    _copied(material, folder, name)
    if rng.random() < 0.5:
        config = json.loads((folder / name / "config.json").read_text())
        config["vocab_size"] = rng.choice((1, 63, 65, 272, 100000, 2**40))
        (folder / name / "config.json").write_text(json.dumps(config))
    arguments, outputs = _on_a_checkpoint(rng, name)
    return _trial(rng, folder, arguments, "vocabulary", outputs)


_TEXTS = ("", " ", "x", "-1", "0", "1.5", "nan", "inf", "1e400", "99999999999999999999", "\x1b[31m", "é\n", "a,b",
          "a=b", "re:[", "*", "../..", "/", "job:x", "sqnr>=", "sqnr>=x", "4GB", "\udcff", LONG, "--json", "e4m3fn",
          "unit", "none")  # fmt: skip
# A number that is legal here and means hours of work, or a name that a hub would be asked for.
_ENDLESS = {"--steps", "--seeds", "--min-iters", "--min-time", "--rounds", "--launches", "--layers", "--eval-batches",
            "--processes", "--threads", "--workers", "--batch-size", "--seq-len", "--batch", "--seq"}  # fmt: skip


def options(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Give one or two options an invalid value."""
    _copied(material, folder, "llama", "unit", "probe", "batch", "bench.json")
    base: Mapping[str, tuple[str, ...]] = {
        "convert": ("convert", "llama", "--verify", "none", "-q", "-o", "OUT"),
        "inspect": ("inspect", "llama"),
        "verify": ("verify", "unit"),
        "restore": ("restore", "unit", "-q", "-o", "OUT"),
        "probe": ("probe", "llama", *PROBE, "-o", "OUT"),
        "finetune": ("finetune", "llama", *TUNE, "-o", "OUT"),
        "bench": ("bench", "nosuch", *BENCH),
        "report": ("report", rng.choice(("unit", "probe", "bench.json"))),
        "batch": ("batch", "batch/jobs.json", "--dry-run"),
        "doctor": ("doctor",),
        "export": ("export", "onnx", "llama", "-q", "-o", "OUT"),
    }
    name = rng.choice([n for n in base for _ in range(1 if n in ("doctor", "export") else 4)])
    command: Any = typer.main.get_command(app)
    command = command.commands[name]
    command = command.commands["onnx"] if name == "export" else command
    given: list[str] = []
    for _ in range(rng.randrange(1, 3)):
        p = rng.choice(
            [p for p in command.params if p.param_type_name == "option" and p.name not in ("help", "output")]
        )
        flag = rng.choice(p.opts)
        if p.is_flag:
            given.append(flag)
            continue
        texts = [t for t in _TEXTS if flag not in _ENDLESS or not t.startswith("9")]
        given += [flag, rng.choice(texts)]
    return _trial(rng, folder, (*base[name], *given), f"options {given}"[:200], ("OUT",))


# Never a device of this machine: what is written by a rename would replace it.
_PLACES = ("", ".", "/", "/proc/x", LONG, f"{LONG}/x", "file", "file/x", "deep/er/x", "dangling", "loop", "loop/x",
           "new\nline", "\udcff", "there", "device", "full/x", "ro/x", "llama", "llama/x", "unit",
           "~nosuchuser/x")  # fmt: skip


def places(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Write to a place where no output can be; `full` and `ro` are file systems next to `material`."""
    _copied(material, folder, "llama", "unit", "probe", "batch")
    (folder / "file").write_text("mine")
    (folder / "there").mkdir()
    (folder / "there" / "mine").write_text("mine")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    if os.geteuid() == 0:
        os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 7))  # as /dev/full: every write fails
    place = rng.choice(_PLACES)
    if place.startswith(("full", "ro")):
        place = str(material.with_name(place.split("/")[0]) / "x")
    force = ("--force",) if rng.random() < 0.3 else ()
    commands = (
        ("convert", "llama", "--verify", "none", "-q", *force, "-o", place),
        ("convert", "llama", "--dry-run", "-o", place),
        ("restore", "unit", "-q", *force, "-o", place),
        ("init", "llama", "--reinit", "-q", *force, "-o", place),
        ("report", "unit", "--html", place),
        ("report", "probe", "--html", place),
        ("batch", "batch/jobs.yaml", "--dry-run", "--junit", place),
        ("bench", "llama", *BENCH, "--save", place),
        ("probe", "llama", *PROBE, *force, "-o", place),
        ("finetune", "llama", *TUNE, *force, "-o", place),
        ("export", "onnx", "llama", "-q", *force, "-o", place),
    )
    weights = (4, 4, 4, 4, 4, 4, 4, 1, 4, 2, 2)
    return _trial(rng, folder, rng.choices(commands, weights)[0], f"written to {place!r}"[:80])


def full_disk(rng: random.Random, material: Path, folder: Path) -> Trial:
    """Limit the size of files, which ends like a full disk."""
    _copied(material, folder, "llama", "unit", "probe", "batch")
    arguments, outputs = rng.choice(
        [
            (("restore", "unit", "-q", "-o", "OUT"), ("OUT",)),
            (("report", "unit", "--html", "p.html"), ("p.html",)),
            (("batch", "batch/jobs.yaml", "-q"), ()),
            _on_a_checkpoint(rng, "llama"),
            _on_a_checkpoint(rng, "llama"),
        ]
    )
    most = rng.choice((0, 10, 1000, 10**4, 3 * 10**4, 10**5))
    trial = _trial(rng, folder, arguments, f"files of at most {most} bytes", outputs)
    return Trial(arguments=trial.arguments, wrong=trial.wrong, outputs=trial.outputs, file_bytes=most)


_WHOLE = ("llama", "bert")
# Each kind with its weight.
ATTACKS: Mapping[str, tuple[int, Attack]] = {
    "config.json": (20, damaged_checkpoint(*_WHOLE, files=["config.json", "generation_config.json"])),
    "tokenizer": (9, damaged_checkpoint(*_WHOLE, files=["tokenizer*.json"], only=["probe", "finetune"])),
    "safetensors": (12, damaged_checkpoint(*_WHOLE, "sharded", files=["*.safetensors", "*.index.json"])),
    "pickle": (5, damaged_checkpoint("pickled", files=["*.bin"])),
    "layout": (8, damaged_checkpoint(*LAYOUTS, "gguf", files=["*.safetensors", "*.gguf", "config.json"])),
    "output": (14, damaged_output),
    "record": (12, damaged_result),
    "data": (4, damaged_data),
    "vocabulary": (3, vocabulary),
    "options": (9, options),
    "place": (7, places),
    "full disk": (5, full_disk),
}
