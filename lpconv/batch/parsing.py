"""Read a manifest file (YAML, TOML or JSON, by suffix) into plain mappings, lists and scalars.

YAML scalars stay text. PyYAML follows YAML 1.1, in which ``on`` and ``no`` are booleans, ``1e-3`` is text and ``010``
is eight; the manifest's fields know their types, so no type has to be guessed. Duplicate keys are an error in all
three.
"""

import json
import tomllib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from lpconv.errors import InputError, UsageError
from lpconv.lookup import find


def read_document(path: Path) -> Any:
    """Return the parsed manifest file. Raises InputError if it cannot be read, UsageError if it does not parse."""
    parse = find("kind of manifest", path.suffix.lower(), _PARSERS)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"cannot read `{path}`: {e.strerror or e}", hint="check the path and its permissions") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"`{path}` is not UTF-8 text: {e}", hint="save the manifest as UTF-8") from e
    try:
        return parse(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        kind = path.suffix.lstrip(".").upper()
        raise UsageError(f"`{path}` is not valid {kind}: {e}", hint="docs/batch.md shows a valid manifest") from e


class _TextLoader(yaml.BaseLoader):
    """YAML loader that keeps every scalar as text, so no type is guessed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` occurs twice", mark)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_TextLoader)


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(n for n in names if names.count(n) > 1)}` occurs twice")
    return mapping


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json,
}
