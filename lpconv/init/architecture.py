"""The architecture of a fresh model: the place of its description, and its config in the requested size. No torch."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.errors import UnsupportedError, UsageError
from lpconv.init.options import InitOptions
from lpconv.models.presets import PRESETS
from lpconv.plan.files import plain_config
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import check_config, read_json

# Names in configs of transformers. Heads keep their size, so their number changes.
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim",
          "word_embed_proj_dim", "embedding_size")  # fmt: skip
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
          "decoder_attention_heads")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers")  # fmt: skip
_UNDIVIDED = ("longt5", "mt5", "switch_transformers", "t5", "umt5")  # their attention lacks the factor 1/√d
_LARGEST_D_KV = 15  # with it, their scores have the size √(15 + 1) = 4, `LARGEST_SCORE` of native unit scaling
PLAIN = "draw it with `lpconv init --method plain`, and train with a recipe such as unit-fp8"


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
    UnsupportedError for a model without native rules, and the errors of `Checkpoint.open`.
    """
    place = _place(model, options)
    if isinstance(place, str):
        resize_config(dict(PRESETS[place].settings), width=options.width, layers=options.layers)  # raises its errors
        return Architecture(name=model, place=place, settings=None)
    settings = plain_config(place) if isinstance(place, Checkpoint) else read_json(place)
    check_config(settings, place.directory if isinstance(place, Checkpoint) else place)
    if options.method == "native" and (lacking := _without_rule(settings)):
        raise UnsupportedError(f"method native has no rule for {lacking}", hint=PLAIN)
    return Architecture(
        name=model, place=place, settings=resize_config(settings, width=options.width, layers=options.layers)
    )


def _without_rule(settings: dict[str, Any]) -> str | None:
    """The part of a model that native unit scaling has no rule for, as far as config.json tells, or None."""
    family, size = settings.get("model_type"), settings.get("d_kv", 64)
    if family in _UNDIVIDED and isinstance(size, int) and size > _LARGEST_D_KV:
        return f"the attention of {family}, which lacks the factor 1/√d: it would start one-hot"
    counts = [settings.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    return "experts" if settings.get("num_experts_per_tok") and any(counts) else None


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


def resize_config(settings: dict[str, Any], *, width: int | None, layers: int | None) -> dict[str, Any]:
    """Return `settings`, a config from JSON, with the given width and number of layers; None keeps the current one.

    Raises UsageError for a width that the heads do not divide, and UnsupportedError for a config that names neither.
    """
    return _set_layers(_set_width(settings, width), layers)


def _set_width(settings: dict[str, Any], width: int | None) -> dict[str, Any]:
    if width is None:
        return settings
    own = _find_sizes(settings, _WIDTHS, "width")
    before = next(iter(own.values()))
    heads = _find_sizes(settings, _HEADS, "number of heads")
    least = before // math.gcd(before, *heads.values())
    if width % least:
        raise UsageError(
            f"--width {width}: heads keep their size, so the width must be a multiple of {least}",
            hint=f"for example --width {max(1, width // least) * least}",
        )
    inner = {k: v for k in _INNER if isinstance(v := settings.get(k), int)}
    changed = {k: max(1, round(v * width / before)) for k, v in {**own, **inner}.items()}
    return {**settings, **changed, **{k: v * width // before for k, v in heads.items()}}


def _set_layers(settings: dict[str, Any], layers: int | None) -> dict[str, Any]:
    if layers is None:
        return settings
    changed: dict[str, Any] = dict.fromkeys(_find_sizes(settings, _LAYERS, "number of layers"), layers)
    if kinds := settings.get("layer_types"):
        changed["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return {**settings, **changed}


def _find_sizes(settings: dict[str, Any], names: tuple[str, ...], what: str) -> dict[str, int]:
    numbers = {k: v for k in names if isinstance(v := settings.get(k), int)}
    if not numbers:
        raise UnsupportedError(
            f"lpconv does not know the {what} setting of a `{settings.get('model_type')}` config",
            hint="change the sizes in its config.json",
        )
    return numbers
