"""Sizes of natively scaled character models at initialisation: convolutions, attention and recurrences.

    python benchmarks/reproduce/character_sizes.py --out benchmarks/results/character-lm/sizes

The root mean square of the data of every linear layer's, convolution's, norm's and table's output, of the gradient that
reaches it and of every matrix's gradient, on one batch of plays; the share within [1/2, 2]. Recurrences run over 20, 40
and 80 bytes, with their gates written in two ways. The models are those of character_lm.py. Writes results.json and
table.md.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from character_models import NORMS, VARIANTS, CharacterLM, Shape
from miniature import Size, draw, observe, read_arguments, rms, save

from lpconv.scaled import native

LEAST, MOST = 0.5, 2.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one kind of numbers of one model: how many lie within [1/2, 2], the smallest and the largest."""

    shape: Shape
    what: str
    inside: float
    count: int
    smallest: float
    largest: float


def shapes() -> list[Shape]:
    found = [Shape(kind=kind, norm=norm) for kind in ("convolution", "attention") for norm in NORMS]
    recurrences = [kind for kind in VARIANTS if kind.startswith("recurrence")]
    return found + [Shape(kind=kind, depth=2, length=n) for kind in recurrences for n in (20, 40, 80)]


def measure(shape: Shape, size: Size) -> list[Sizes]:
    model = native(CharacterLM(shape), seed=0)
    batch = draw("llama", replace(size, length=shape.length))
    seen = observe(model, batch)
    model(**batch).loss.backward()
    found = {
        "outputs": [v for (_, what), v in seen.items() if what == "activation"],
        "gradients": [v for (_, what), v in seen.items() if what == "gradient"],
        "weight gradients": [rms(p.grad) for p in model.parameters() if p.dim() > 1],
    }
    return [
        Sizes(shape=shape, what=what, count=len(v), smallest=min(v), largest=max(v),
              inside=sum(LEAST <= x <= MOST for x in v) / len(v))
        for what, v in found.items()
    ]  # fmt: skip


def table(found: Sequence[Sizes]) -> str:
    kinds = list(dict.fromkeys(s.what for s in found))
    lines = ["| model | norm | bytes | " + " | ".join(kinds) + " |", "|---" * (3 + len(kinds)) + "|"]
    for shape in dict.fromkeys(s.shape for s in found):
        cells = [
            f"{s.inside:.0%} of {s.count} ({s.smallest:.2g} to {s.largest:.2g})" for s in found if s.shape == shape
        ]
        lines.append(f"| {shape.kind} | {shape.norm} | {shape.length} | " + " | ".join(cells) + " |")
    return "\n".join(["Share of native data with a size within [1/2, 2] (smallest to largest)", "", *lines, ""])


def main() -> None:
    out, size = read_arguments(__doc__)
    found = [sizes for shape in shapes() for sizes in measure(shape, size)]
    save(out, asdict(size), {"sizes": [asdict(s) for s in found]}, [table(found)])


if __name__ == "__main__":
    main()
