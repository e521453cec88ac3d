"""The page about formats says what the code says: its tables are generated."""

import math
from pathlib import Path

from lpconv.formats.spec import BLOCK_FORMATS, FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def number(x: float) -> str:
    half, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if half == 0.5 and not 2**-4 <= x <= 16 else f"{x:g}"


def format_table() -> str:
    lines = [
        "| name | sign, exponent, mantissa bits | largest | smallest normal | smallest | Inf | NaN | stored as |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in FORMATS.values():
        bits = f"{int(f.has_sign)}-{f.exponent_bits}-{f.mantissa_bits}"
        where = f"`torch.{f.torch}`" if f.torch else "float32" if f.storage_bits == 32 else "packed bytes"
        inf, nan = ("yes" if has else "no" for has in (f.has_inf, f.has_nan))
        small = number(f.min_subnormal)
        lines.append(
            f"| {f.name} | {bits} | {number(f.max)} | {number(f.min_normal)} | {small} | {inf} | {nan} | {where} |"
        )
    return "\n".join(lines)


def block_table() -> str:
    lines = ["| name | element | block | scale | bits per element |", "|---|---|---|---|---|"]
    for f in BLOCK_FORMATS.values():
        scale = f.scale.name + (", and one float32 per tensor" if f.has_tensor_scale else "")
        lines.append(f"| {f.name} | {f.element.name} | {f.size} | {scale} | {f.bits:g} |")
    return "\n".join(lines)


def test_the_tables_are_those_of_the_records() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert format_table() in text
    assert block_table() in text
