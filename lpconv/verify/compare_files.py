"""Compare the files next to the weights of two checkpoints: configs, tokenizer, chat template and others.

A value in both files must be equal. Tools may omit or write defaults, so a key in only one file is judged by opening
both files with transformers; if that fails, the key counts as a difference.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lpconv.plan.files import CARD, LOADER, model_side_files, plain_config
from lpconv.results import FilesCheck
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.gguf import GGUF

_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|normalizer)[^/]*\.(json|txt|jinja)"
    r"|additional_chat_templates/.*|[^/]*\.(model|tiktoken|vocab)"
)
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\..*|.*\.(model|tiktoken)")
# Keys that describe the writer or the class that opens a file: reported if they differ, but not a failure.
_BOOKKEEPING = re.compile(
    r"(.*\.)?(_name_or_path|name_or_path|transformers_version|_?commit_hash|dtype|torch_dtype|auto_map|tokenizer_class"
    r"|backend|is_local|local_files_only|processor_class|special_tokens_map_file|tokenizer_file)"
)
_SHOWN, _WIDTH = 3, 60  # most differences shown per document, and characters per value
_ABSENT = object()


def compare_files(model: Openable, reference: Openable, *, config: bool = True) -> FilesCheck:
    """Compare the small files of a checkpoint with those of `reference`; config.json only if `config` is set.

    Raises the errors of reading a checkpoint.
    """
    pair = [Checkpoint.open(model), Checkpoint.open(reference)]
    if config and GGUF in {c.kind for c in pair}:
        return FilesCheck(not_compared=("config and tokenizer, which GGUF files store differently",))
    names = sorted({n for c in pair for n in model_side_files(c)})
    tokenizer = [n for n in names if _TOKENIZER.fullmatch(n)]
    check = _FileComparison()
    if config:
        check.compare("config.json", [plain_config(c) for c in pair], lambda: [_config(c).to_dict() for c in pair])
        check.not_compared += ["quantization_config"] if any("quantization_config" in c.config for c in pair) else []
    if tokenizer:
        parts = [{n: _read(c, n) for n in tokenizer if n in c.side_files} for c in pair]
        has = [any(map(_VOCABULARY.fullmatch, part)) for part in parts]
        if all(has):
            check.compare("tokenizer", parts, lambda: _tokenizers(pair, parts))
        else:
            check.not_compared.append(f"tokenizer (only {'this one' if has[0] else 'the reference'} has one)")
    for name in (n for n in names if n not in tokenizer):
        if all(name in c.side_files for c in pair):
            read = [_read(c, name) for c in pair]
            is_json = all(isinstance(document, dict) for document in read)
            opened = functools.partial(map, _generation, read) if name == "generation_config.json" else None
            check.compare(name, read if is_json else [{"text": document} for document in read], opened)
        else:
            check.not_compared.append(f"{name} (only {'this one' if name in pair[0].side_files else 'the reference'})")
    check.not_compared += [n for n in (CARD, LOADER) if (pair[0].directory / n).is_file()]
    return FilesCheck(
        compared=tuple(check.compared), different=tuple(check.different), not_compared=tuple(check.not_compared)
    )


class _FileComparison:
    """Files compared so far, differences, and files or keys that were not compared."""

    def __init__(self) -> None:
        self.compared, self.different, self.not_compared = list[str](), list[str](), list[str]()

    def compare(self, name: str, pair: Sequence[Any], opened: Callable[[], Iterable[Any]] | None = None) -> None:
        """Compare two documents. `opened` opens both with transformers and is called if one lacks a key."""
        self.compared.append(name)
        differences = list(_differences(*pair))
        shown = [d for d in differences if _ABSENT not in d[1:]]
        if len(shown) < len(differences):
            try:
                effects = list(_differences(*opened())) if opened else differences
            except Exception:  # transformers and tokenizers raise arbitrary exceptions for unknown files
                effects = differences
            if not effects and name != "config.json":  # a config keeps every key when opened; a tokenizer may drop some
                self.not_compared += [
                    f"{name}: {d[0]} (only in one of them, without effect)" for d in differences if d not in shown
                ]
            shown += [d for d in effects if d[0] not in {key for key, *_ in shown}]
        self.not_compared += [f"{name}: {key}" for key, *_ in shown if _BOOKKEEPING.fullmatch(key)]
        shown = [d for d in shown if not _BOOKKEEPING.fullmatch(d[0])]
        self.different += [f"{name}: {_difference_text(*d)}" for d in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            self.different.append(f"{name}: {len(shown) - _SHOWN} more values differ")


def _differences(ours: Any, theirs: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys at which two documents differ, with both values; null counts as absent."""
    for key in sorted({*ours, *theirs}):
        a, b = (_ABSENT if d.get(key) is None else d[key] for d in (ours, theirs))
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{place}{key}.")
        elif a != b:
            yield f"{place}{key}", a, b


def _difference_text(key: str, ours: Any, theirs: Any) -> str:
    a, b = ("absent" if v is _ABSENT else f"{v!r:.{_WIDTH}}" for v in (ours, theirs))
    return f"`{key}` is {a}, but {b} in the reference"


def _read(checkpoint: Checkpoint, name: str) -> Any:
    """A file as parsed JSON if possible, else as text."""
    data = (checkpoint.directory / name).read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="surrogateescape").replace("\r\n", "\n")


def _config(checkpoint: Checkpoint) -> Any:
    import transformers  # slow to import (seconds)

    return transformers.CONFIG_MAPPING[checkpoint.config["model_type"]].from_dict(plain_config(checkpoint))


def _generation(settings: dict[str, Any]) -> Any:
    import transformers

    return transformers.GenerationConfig.from_dict(settings).to_dict()


def _tokenizers(pair: Sequence[Checkpoint], files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The opened tokenizers as documents: parts, special tokens, template, and every setting that either has."""
    from lpconv.models.tokenizer import read_tokenizer

    keys = {k for both in files for k in both.get("tokenizer_config.json", {})} | {"chat_template"}
    documents = []
    for checkpoint in pair:
        opened = read_tokenizer(checkpoint.directory)
        settings = {k: getattr(opened, k, opened.init_kwargs.get(k)) for k in keys}
        engine = opened.backend_tokenizer.to_str() if hasattr(opened, "backend_tokenizer") else opened.get_vocab()
        parts = json.loads(engine) if isinstance(engine, str) else engine
        documents.append({"special tokens": opened.special_tokens_map, "parts": parts, **settings})
    return documents
