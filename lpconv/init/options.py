"""What a fresh checkpoint is asked for. Plain Python; reads headers only."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from lpconv.checkpoint.checkpoint import Checkpoint
from lpconv.checkpoint.contents import check_config, read_json
from lpconv.convert.files import plain_config
from lpconv.errors import UsageError
from lpconv.init.sizes import resized
from lpconv.models.presets import PRESETS
from lpconv.options import Force, Option, Revision

_INIT_METHODS = {
    "native": "unit normal weights, and scales by theory, for recipes such as native-fp8 (Blake et al. 2023)",
    "plain": "as transformers initialises the architecture, to train beside it",
}


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How weights are drawn, and of which size."""

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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model to draw: what was typed for it, where it is described, and its config in the size that is wanted.

    `place` is the name of a preset, whose `settings` transformers has (None here), a config file or a checkpoint.
    """

    name: str
    place: str | Path | Checkpoint
    settings: dict[str, Any] | None


def find_architecture(model: str, options: InitOptions) -> Architecture:
    """The architecture that `model` means. Raises UsageError for a checkpoint with weights that `reinit` does not give
    up and for a size that its heads do not divide into, and as `Checkpoint.open` does."""
    place = _place(model, options)
    if isinstance(place, str):
        return Architecture(name=model, place=place, settings=None)
    settings = plain_config(place) if isinstance(place, Checkpoint) else read_json(place)
    check_config(settings, place.directory if isinstance(place, Checkpoint) else place)
    return Architecture(name=model, place=place, settings=resized(settings, width=options.width, layers=options.layers))


def _place(model: str, options: InitOptions) -> str | Path | Checkpoint:
    if model in PRESETS and not os.path.isdir(model):
        return model
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) and path.suffix == ".json":
        return path
    if os.path.isfile(path / "config.json") and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        return path / "config.json"
    checkpoint = Checkpoint.open(model, revision=options.revision)
    if not options.reinit:
        raise UsageError(
            f"`{model}` has weights, and a fresh model would have none of what they learnt",
            hint="--reinit takes its architecture only; recipes such as unit-fp8 train it as it is",
        )
    return checkpoint
