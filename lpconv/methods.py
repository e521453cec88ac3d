"""The four conversion methods, as records in `METHODS`. Plain Python, so that planning does not import torch.

- unit: unit scaling (Blake et al. 2023, arXiv 2303.11257): codes of unit RMS with power-of-two scales that are fixed
  before the run.
- scalify: Scalify (Balanca et al. 2024, arXiv 2407.17353): the same codes, with scales that propagate in the model.
- collage: Collage (Yu et al. 2024, arXiv 2405.03637): an ordinary 16-bit checkpoint that any tool opens, and the lost
  low bits in files next to it.
- multipoint: Multipoint quantisation (Liu et al. 2020, arXiv 2002.09049): each row of a matrix as a sum of one or more
  low-bit rows with a scale each, as many as the bit budget allows.
"""

from dataclasses import dataclass, replace

from lpconv.errors import UsageError
from lpconv.formats.grains import Grain, default_grain
from lpconv.formats.spec import INTEGERS, Format, get_format
from lpconv.forms import FORMS, Form
from lpconv.layouts import LAYOUTS

LPCONV = "lpconv"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to store a weight as a short sum of scaled components, value = Σ_i scale_i · component_i.

    `own` is the kind of the form of converted tensors in lpconv's own layout, or of the form that selects another one.
    `has_granularity`: scales finer than one per tensor are allowed, also in the formats of a `Grain`, and so are
    third-party layouts. `residuals` are the residuals that a pair can have, the default first. `has_budget`: a bit
    budget decides how much is stored.
    """

    name: str
    own: str
    formats: tuple[str, ...]
    default_format: str
    has_granularity: bool = False
    residuals: tuple[str, ...] = ()
    has_budget: bool = False

    def format(self, name: str | None, grain: Grain | None = None, *, is_of_rule: bool = False) -> Format:
        """The format called `name`; for None, the default of the granularity or of the method.

        Raises UsageError if the method does not support that format at that granularity.
        """
        allowed, is_own = self.formats_with(grain), grain is None or not grain.formats
        fmt = get_format(name or (self.default_format if is_own else allowed[0]))
        if fmt.name not in allowed:
            own_grain = default_grain(fmt.name) if self.has_granularity else None
            one = " with one scale per tensor" if own_grain and grain is None else ""
            what = one if grain is None or is_own else f" with {grain.words}"
            # the granularity holds for all tensors, and those of a rule should not change the others' format
            finer = own_grain if not is_of_rule else "row" if own_grain and fmt.name in INTEGERS else None
            more = f", or {fmt.name} with --granularity {finer}" if finer else ""
            raise UsageError(
                f"method `{self.name}` does not write format `{fmt.name}`{what}",
                hint="it writes " + ", ".join(allowed) + more,
            )
        return fmt

    def formats_with(self, grain: Grain | None) -> tuple[str, ...]:
        """The formats that it writes at a granularity, None for one scale per tensor."""
        return self.formats if grain is None else grain.formats or (*self.formats, *INTEGERS)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts that it can write, lpconv's own first."""
        return (LPCONV, *(n for n, x in LAYOUTS.items() if x.form is not None)) if self.has_granularity else (LPCONV,)

    def form(self, layout: str) -> type[Form]:
        """The form of converted tensors in `layout`, which the method must support."""
        return LAYOUTS[layout].form or FORMS[self.own]


_UNIT = Method(
    name="unit",
    own="tiles",
    has_granularity=True,
    formats=("fp32", "fp16", "bf16", "e4m3fn", "e5m2"),
    default_format="fp16",
)
METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        _UNIT,
        replace(_UNIT, name="scalify"),
        Method(
            name="collage",
            own="pair",
            formats=("bf16", "fp16"),
            default_format="bf16",
            residuals=("bf16", "exact16", "int8"),
        ),
        Method(
            name="multipoint",
            own="points",
            formats=(*INTEGERS, "e4m3fn", "e2m1"),
            default_format="int4",
            has_budget=True,
        ),
    )
}
