"""Resize an architecture: its config with another width or number of layers."""

import math
from typing import Any

from lpconv.errors import UnsupportedError, UsageError

# Names in configs of transformers. Heads keep their size, so their number changes.
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim",
          "word_embed_proj_dim", "embedding_size")  # fmt: skip
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
          "decoder_attention_heads")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers")  # fmt: skip


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
