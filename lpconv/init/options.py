"""Options of `lpconv init`. Plain Python; nothing here reads a file."""

from dataclasses import dataclass

from annotated_types import Ge, Lt

from lpconv.options import Force, Revision, option

_INIT_METHODS = {
    "native": "unit-scale weights and static scales by theory, for recipes such as native-fp8 (Blake et al. 2023)",
    "plain": "as transformers initialises the architecture, to compare with",
}


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How weights are drawn, and the size of the model."""

    method: str = option("native", "How to draw the weights", choices=_INIT_METHODS, short=("-m",))
    width: int | None = option(
        None,
        "Hidden size; heads keep their size, and feed-forward layers their ratio",
        Ge(1),
        default="as in the config",
    )
    layers: int | None = option(None, "Number of layers", Ge(1), Lt(10_001), default="as in the config")
    tokenizer: str | None = option(
        None, "Model to copy the tokenizer from", default="the architecture's own, if it has one", metavar="MODEL"
    )
    reinit: bool = option(False, "Use the architecture of a trained checkpoint and draw new weights")
    seed: int = option(0, "Seed for drawing the weights", Ge(0))
    revision: Revision = None
    force: Force = False
