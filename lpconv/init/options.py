"""Options of `lpconv init`. Plain Python; nothing here reads a file."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lpconv.options import Force, Option, Revision

_INIT_METHODS = {
    "native": "unit normal weights, and scales by theory, for recipes such as native-fp8 (Blake et al. 2023)",
    "plain": "as transformers initialises the architecture, to train beside it",
}


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How weights are drawn, and the size of the model."""

    method: Annotated[str, Option("Method that draws the weights", choices=_INIT_METHODS, short=("-m",))] = "native"
    width: Annotated[
        int | None,
        Ge(1),
        Option("Width of the residual stream; heads keep their size, inner widths their ratio", default="as it is"),
    ] = None
    layers: Annotated[int | None, Ge(1), Option("Number of layers", default="as it is")] = None
    tokenizer: Annotated[
        str | None,
        Option("Model whose tokenizer is copied", default="the architecture's own, if it has one", metavar="MODEL"),
    ] = None
    reinit: Annotated[bool, Option("Take the architecture of a trained checkpoint, and draw new weights")] = False
    seed: Annotated[int, Ge(0), Option("Seed of the weights")] = 0
    revision: Revision = None
    force: Force = False
