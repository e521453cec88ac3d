"""Recorded results of benchmarks, which pages and tests quote."""

import json
import lzma
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "recorded"]

ROOT = Path(__file__).parents[2]


def recorded(name: str) -> Any:
    """The recorded result of that name, such as "kernels" or "native/sizes/results", of any group."""
    (path,) = ROOT.glob(f"benchmarks/*/results/{name}.json*")
    raw = path.read_bytes()
    return json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
