"""Random damage to the bytes of a file, or to a value of a JSON document."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Damage = Callable[[random.Random, bytes], bytes]

# Values that a JSON document may have anywhere, and that nobody expects there.
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 5, 1.5, float("inf"), 2**63, 2**200, "", "x", "\ud800", "../../x", "/etc/passwd", "a\nb",
    "\x1b[31m", [], {}, [1], [None], ["a"], {"a": 1}, [[]], "F64", "keep",
)  # fmt: skip


def flip_bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def drop(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 9) :]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def retype(rng: random.Random, data: bytes) -> bytes:
    """Replace characters by others that have a meaning in JSON."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],:-.eE \\')
    return bytes(changed)


def repeat(rng: random.Random, data: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:end] + data[begin:end] + data[end:]


BYTES: tuple[Damage, ...] = (flip_bit, cut, drop, insert, retype, repeat)


def odd_value(rng: random.Random, data: bytes) -> bytes:
    """Replace one value or remove one key of a JSON document."""
    document = json.loads(data)
    *path, last = rng.choice([p for p in _paths(document) if p])
    owner = document
    for key in path:
        owner = owner[key]
    if isinstance(owner, dict) and rng.random() < 0.3:
        del owner[last]
    else:
        owner[last] = rng.choice(ODD_VALUES)
    return json.dumps(document).encode()


def _paths(document: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield prefix
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _paths(value, (*prefix, key))
