"""Print the tables of docs/verify.md: how much planted damage each level of verification detects.

python -m tests.faults.damage_page
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.faults.damage import Damage, Pair, Seen, damages, look, make_outputs, seen_in_outputs
from tests.faults.differences import differences, make_layouts

__all__ = ["OUTPUTS_SEE", "in_layouts", "in_outputs", "matrix", "paragraphs"]

OUTPUTS_SEE = {("codes", "NaN"), ("codes", "0xFF")}


def matrix(outputs: Mapping[str, Pair]) -> dict[str, list[Seen]]:
    """Results of all damages, by form."""
    return {form: [s for d in damages(form, pair.output) if (s := look(d, pair))] for form, pair in outputs.items()}


def in_layouts(outputs: Mapping[str, Pair]) -> dict[str, list[Seen]]:
    """Results of all planted differences, by layout."""
    return {layout: [s for d in differences() if (s := look(d, pair))] for layout, pair in outputs.items()}


def in_outputs(form: str, pair: Pair) -> list[tuple[Damage, bool]]:
    """Whether running both models shows the damage that makes outputs NaN or infinite."""
    tried = [d for d in damages(form, pair.output) if (d.component, d.kind) in OUTPUTS_SEE and _has_nan(form)]
    return [(d, seen_in_outputs(d, pair)) for d in tried]


def _has_nan(form: str) -> bool:
    """Whether codes of a form can be NaN; integers and those of four bits cannot."""
    return not any(word in form for word in ("points", "e2m1", "int4", "entropy"))


def paragraphs(
    found: Mapping[str, Iterable[Seen]],
    ran: Mapping[str, Iterable[tuple[Damage, bool]]],
    different: Mapping[str, Iterable[Seen]],
) -> list[str]:
    """The tables and totals of docs/verify.md."""
    everything = [s for seen in found.values() for s in seen]
    hashes, weights = sum(s.hashes for s in everything), sum(s.weights for s in everything)
    of_outputs = [seen for pairs in ran.values() for _, seen in pairs]
    total = (
        f"Of {len(everything)} kinds of damage `hash` found {hashes} and `weights` {weights}. Outputs alone, without "
        f"weights being compared, showed {sum(of_outputs)} of {len(of_outputs)} damages that make them NaN: codes of "
        "floating-point forms set to NaN or to 0xFF."
    )
    planted = [s for seen in different.values() for s in seen]
    kinds = len({(s.damage.component, s.damage.kind) for s in planted})
    passed = sum(not s.weights for s in planted)
    of_layouts = (
        f"`weights` let {passed or 'none'} of these {len(planted)} differences of {kinds} kinds pass. With the old "
        f"hashes, `hash` found {sum(s.hashes for s in planted)}."
    )
    return [_table("form", found), total, _table("layout", different), of_layouts]


def _table(title: str, found: Mapping[str, Iterable[Seen]]) -> str:
    """The number of noticed cases by row and component."""
    cells: dict[str, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
    for name, seen in found.items():
        for s in seen:
            cells[name][s.damage.component].append(s)
    components = list(dict.fromkeys(c for row in cells.values() for c in row))
    lines = [f"| {title} | {' | '.join(components)} |", "|---|" + "---|" * len(components)]
    lines += [f"| {name} | " + " | ".join(_cell(row[c]) for c in components) + " |" for name, row in cells.items()]
    return "\n".join(lines)


def _cell(seen: list[Seen]) -> str:
    return f"{sum(s.weights for s in seen)} of {len(seen)}" if seen else "-"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        outputs = make_outputs(Path(folder))
        ran = {f: in_outputs(f, pair) for f, pair in outputs.items()}
        print(*paragraphs(matrix(outputs), ran, in_layouts(make_layouts(Path(folder)))), sep="\n\n")
