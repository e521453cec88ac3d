"""Edit config, tokenizer, generation config and chat template of checkpoints, and see what `verify --against` says.

    python -m benchmarks.attack.edits --count 300 --out FILE.json

Checkpoints are the embedded model with a chat template, and conversions of it whose SHA256SUMS are made anew after each
edit. An edit is refused (exit code 5, or 3 and 4 for files that no longer open), reported among what was not compared,
or silent, which is a fault.
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks import common
from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.plan.files import write_sums

CONVERSIONS = {
    "unit fp16": ("--format", "fp16"),
    "compressed-tensors e4m3fn": ("--format", "e4m3fn", "--layout", "compressed-tensors"),
    "collage bf16": ("--method", "collage"),
}
_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One edit of one checkpoint: the exit code of verify, and what became of it: refused, reported or silent."""

    number: int
    checkpoint: str
    document: str
    what: str
    code: int
    outcome: str


def _leaves(document: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = document.items() if isinstance(document, dict) else []
    found = [leaf for k, v in items for leaf in _leaves(v, (*place, k))]
    return found or ([place] if place else [])


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, such as somebody might write."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value * 2 + 1, max(value - 1, 0) if value else 1))
    if isinstance(value, float):
        return rng.choice((value * 10 + 1e-3, value / 2 + 1e-9, value + 1.0))
    if isinstance(value, str):
        return {"silu": "gelu", "default": "linear", "<|endoftext|>": "a"}.get(value, value + "x")
    return [*value, value[0] if value else 1] if isinstance(value, list) else 1


def _edit_json(folder: Path, name: str, rng: random.Random) -> str:
    """Another value for a random key, or a key that was not there."""
    document = json.loads((folder / name).read_text())
    new = {
        "config.json": {"attention_multiplier": 2.0, "sliding_window": 16, "num_experts": 4, "final_softcap": 30.0},
        "generation_config.json": {"temperature": 0.5, "repetition_penalty": 1.3, "max_new_tokens": 7, "top_k": 3},
        "tokenizer_config.json": {"padding_side": "left", "truncation_side": "left", "add_bos_token": True,
                                  "unk_token": "a", "add_prefix_space": True},
    }[name]  # fmt: skip
    if rng.random() < 0.25:
        key = rng.choice([k for k in new if k not in document])
        document[key] = new[key]
        what = f"{key} added"
    else:
        *path, key = rng.choice(_leaves(document))
        inner = document
        for step in path:
            inner = inner[step]
        inner[key] = _other(inner[key], rng)
        what = f"{'.'.join((*path, key))} = {inner[key]!r:.40}"
    (folder / name).write_text(json.dumps(document, indent=2))
    return what


def _edit_tokenizer(folder: Path, rng: random.Random) -> str:
    """Swapped ids, a lost or moved merge, other special tokens, other steps before and after."""
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    kinds = ["swap", "rename", "added", "steps", *(["merge", "order"] if len(merges) > 1 else [])]
    kind = rng.choice(kinds)
    if kind == "swap":
        a, b = rng.sample(sorted(vocab), 2)
        vocab[a], vocab[b] = vocab[b], vocab[a]
    elif kind == "rename":
        a = rng.choice(sorted(vocab))
        vocab[a + "zz"] = vocab.pop(a)
    elif kind == "added":
        token = rng.choice(document["added_tokens"])
        key = rng.choice(("special", "lstrip", "rstrip", "single_word", "normalized"))
        token[key] = not token[key]
    elif kind == "merge":
        merges.pop(rng.randrange(len(merges)))
    elif kind == "order":
        merges.insert(0, merges.pop())
    else:
        name, value = rng.choice((
            ("normalizer", {"type": "Lowercase"}), ("decoder", {"type": "Fuse"}),
            ("pre_tokenizer", {"type": "Whitespace"}), ("truncation", {
                "max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}),
        ))  # fmt: skip
        document[name] = value
        kind = name
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return kind


def _edit_template(folder: Path, rng: random.Random) -> str:
    path = folder / "chat_template.jinja"
    text = path.read_text()
    kind = rng.choice(("one character", "role", "appended", "removed", "second template"))
    if kind == "one character":
        place = rng.randrange(len(text))
        path.write_text(text[:place] + chr((ord(text[place]) - 31) % 94 + 32) + text[place + 1 :])
    elif kind == "role":
        path.write_text(text.replace("role", "content", 1))
    elif kind == "appended":
        path.write_text(text + "Obey.")
    elif kind == "removed":
        path.unlink()
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tools.jinja").write_text("Obey.")
    return kind


EDITS: dict[str, Callable[[Path, random.Random], str]] = {
    "config": lambda folder, rng: _edit_json(folder, "config.json", rng),
    "generation config": lambda folder, rng: _edit_json(folder, "generation_config.json", rng),
    "tokenizer settings": lambda folder, rng: _edit_json(folder, "tokenizer_config.json", rng),
    "tokenizer": _edit_tokenizer,
    "chat template": _edit_template,
}


def _run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(w) for w in words])
    return done.exit_code, done.stdout, done.stderr


def make_checkpoints(work: Path) -> dict[str, Path]:
    """The plain checkpoint, and what it was converted into."""
    shutil.copytree(demo_checkpoint(), work / "plain")
    (work / "plain" / "chat_template.jinja").write_text(_TEMPLATE)
    found = {"plain": work / "plain"}
    for name, options in CONVERSIONS.items():
        found[name] = work / name
        code, _, said = _run("convert", work / "plain", *options, "--verify", "none", "-q", "-o", work / name)
        assert code == 0, said
    return found


def edit_all(numbers: Sequence[int], seed: int, work: Path) -> list[Edit]:
    """Make the edits of these numbers, one after the other, on checkpoints in turn."""
    made = make_checkpoints(work)
    for folder in made.values():  # nothing is said of what nobody edited
        assert _verified(folder, made["plain"])[0] == 0
    found = []
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        name = list(made)[number % len(made)]
        document = rng.choice(list(EDITS))
        folder = work / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made[name], folder, copy_function=_copy)
        before = _texts(folder)
        what = EDITS[document](folder, rng)
        assert _texts(folder) != before, what
        if name != "plain":
            write_sums(folder, ())
        code, out, said = _verified(folder, made["plain"])
        assert code in (0, 3, 4, 5), said
        outcome = "refused" if code else "reported" if _is_reported(what, out) else "silent"
        found.append(Edit(number=number, checkpoint=name, document=document, what=what, code=code, outcome=outcome))
        if outcome == "silent":
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _copy(source: str, target: str) -> None:
    """Weights are never edited: they are links."""
    (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, target)


def _texts(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".safetensors")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def _verified(folder: Path, reference: Path) -> tuple[int, str, str]:
    level = (
        () if folder.name in ("plain", "edited") and not (folder / "lpconv.json").exists() else ("--level", "weights")
    )
    return _run("verify", folder, "--against", reference, *level, "--json", "-q")


def _is_reported(what: str, out: str) -> bool:
    names = json.loads(out)["files"]["not_compared"]
    return any(what.split(" ")[0] in name or (what == "removed" and "template" in name) for name in names)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with common.work_folder(None) as work:
        found = edit_all(args.only or range(args.count), args.seed, work)
    table: dict[str, Any] = {}
    for checkpoint in ("plain", *CONVERSIONS):
        row = [e for e in found if e.checkpoint == checkpoint]
        table[checkpoint] = {d: dict(Counter(e.outcome for e in row if e.document == d)) for d in EDITS}
    result = {
        "command": common.command(),
        "edits": len(found),
        "outcomes": dict(Counter(e.outcome for e in found)),
        "exit_codes": dict(sorted(Counter(e.code for e in found).items())),
        "by_checkpoint": table,
        "reported": [asdict(e) for e in found if e.outcome == "reported"],
        "silent": [asdict(e) for e in found if e.outcome == "silent"],
    }
    print(json.dumps(result, indent=1))
    common.save(result, args.out)


if __name__ == "__main__":
    main()
