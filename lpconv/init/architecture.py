"""The architecture of a fresh model: the place of its description, and its config in the requested size. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.errors import UsageError
from lpconv.init.options import InitOptions
from lpconv.init.sizes import resize_config
from lpconv.models.presets import PRESETS
from lpconv.plan.files import plain_config
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import check_config, read_json


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model to draw: its name as typed, the place of its description, and its config in the requested size.

    `place` is the name of a preset (`settings` is then None, since transformers has them), a config file or a
    checkpoint.
    """

    name: str
    place: str | Path | Checkpoint
    settings: dict[str, Any] | None


def find_architecture(model: str, options: InitOptions) -> Architecture:
    """Find the architecture that `model` names.

    Raises UsageError for a checkpoint with weights unless `reinit` is set and for a width that the heads do not divide,
    and the errors of `Checkpoint.open`.
    """
    place = _place(model, options)
    if isinstance(place, str):
        return Architecture(name=model, place=place, settings=None)
    settings = plain_config(place) if isinstance(place, Checkpoint) else read_json(place)
    check_config(settings, place.directory if isinstance(place, Checkpoint) else place)
    return Architecture(
        name=model, place=place, settings=resize_config(settings, width=options.width, layers=options.layers)
    )


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
            f"`{model}` has trained weights, which a fresh model would not use",
            hint="pass --reinit to use only its architecture, or train it as it is with a recipe such as unit-fp8",
        )
    return checkpoint
