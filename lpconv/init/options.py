"""Options of `lpconv init`. Plain Python; nothing here reads a file."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from lpconv.options import Force, Option, Revision

_INIT_METHODS = {
    "native": "unit-scale weights and static scales by theory, for recipes such as native-fp8 (Blake et al. 2023)",
    "plain": "as transformers initialises the architecture, to compare with",
}


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How weights are drawn, and the size of the model."""

    method: Annotated[str, Option("How to draw the weights", choices=_INIT_METHODS, short=("-m",))] = "native"
    width: Annotated[
        int | None,
        Ge(1),
        Option("Hidden size; heads keep their size, and feed-forward layers their ratio", default="as in the config"),
    ] = None
    layers: Annotated[int | None, Ge(1), Lt(10_001), Option("Number of layers", default="as in the config")] = None
    tokenizer: Annotated[
        str | None,
        Option("Model to copy the tokenizer from", default="the architecture's own, if it has one", metavar="MODEL"),
    ] = None
    reinit: Annotated[bool, Option("Use the architecture of a trained checkpoint and draw new weights")] = False
    seed: Annotated[int, Ge(0), Option("Seed for drawing the weights")] = 0
    revision: Revision = None
    force: Force = False
