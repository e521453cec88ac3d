"""The conversion methods: four records, listed in `METHODS`. Plain Python, so that planning needs no torch.

- unit: unit scaling (Blake et al. 2023, arXiv 2303.11257), codes of unit RMS with power-of-two scales that are fixed
  before the run.
- scalify: Scalify (Balanca et al. 2024, arXiv 2407.17353), the same codes with scales that propagate as the model runs.
- collage: Collage (Yu et al. 2024, arXiv 2405.03637), an ordinary 16-bit checkpoint that any tool opens, and what its
  rounding lost in files beside it.
- multipoint: Multipoint quantisation (Liu et al. 2020, arXiv 2002.09049), each row of a matrix as one or more rows of
  few bits with a scale each, as many as a bit budget pays for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpconv.errors import UsageError
from lpconv.formats.grains import Grain, grain_for
from lpconv.formats.spec import Format, get_format
from lpconv.storage.compressed import COMPRESSED_TENSORS

if TYPE_CHECKING:
    from lpconv.forms import Form


LPCONV, TRANSFORMERS = "lpconv", "transformers"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to write a weight as a short sum of scaled components, value = Σ_i scale_i · component_i.

    `forms` names the form that each layout gives a converted tensor, or that decides which other one it gets.
    `has_granularity` says that less than a tensor may have a scale of its own, in the formats of a `Grain` too.
    `residuals` are the residuals of a pair, the first one its default; `has_budget` says that a bit budget decides how
    much is stored.
    """

    name: str
    forms: Mapping[str, str]
    formats: tuple[str, ...]
    default_format: str
    has_granularity: bool = False
    residuals: tuple[str, ...] = ()
    has_budget: bool = False

    def format(self, name: str | None, grain: Grain | None = None) -> Format:
        """The format called `name`, for None the default of the granularity or the method.

        Raises UsageError where the method has no such format with scales of that granularity.
        """
        allowed = grain.formats if grain is not None and grain.formats else self.formats
        fmt = get_format(name or (self.default_format if allowed is self.formats else allowed[0]))
        if fmt.name not in allowed:
            what = "" if grain is None or allowed is self.formats else f" with {grain.words}"
            finer = grain_for(fmt.name) if self.has_granularity else None
            more = f", or {fmt.name} with --granularity {finer}" if finer else ""
            raise UsageError(
                f"method `{self.name}` does not write format `{fmt.name}`{what}",
                hint="it writes " + ", ".join(allowed) + more,
            )
        return fmt

    def form(self, layout: str) -> "type[Form]":
        """The form of converted tensors in a layout that the method has."""
        from lpconv.forms import FORMS  # the command line starts with the names of methods, and needs no form

        return FORMS[self.forms[layout]]


_WITH_SCALES = {
    LPCONV: "tiles", COMPRESSED_TENSORS: "compressed tiles", TRANSFORMERS: "fine-grained",
}  # fmt: skip
METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(
            name="unit",
            forms=_WITH_SCALES,
            has_granularity=True,
            formats=("fp32", "fp16", "bf16", "e4m3fn", "e5m2"),
            default_format="fp16",
        ),
        Method(
            name="scalify",
            forms=_WITH_SCALES,
            has_granularity=True,
            formats=("fp32", "fp16", "bf16", "e4m3fn", "e5m2"),
            default_format="fp16",
        ),
        Method(
            name="collage",
            forms={LPCONV: "pair"},
            formats=("bf16", "fp16"),
            default_format="bf16",
            residuals=("bf16", "exact16", "int8"),
        ),
        Method(
            name="multipoint",
            forms={LPCONV: "points"},
            formats=("int4", "int8", "e4m3fn", "e2m1"),
            default_format="int4",
            has_budget=True,
        ),
    )
}
