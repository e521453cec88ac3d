"""Low-precision weights as others store them, for reading: a file for each layout, with the arithmetic of `grid.py`.

A layout is a file with the `quant_method`s that configs name it by, and `find`, which makes a `Grid` of the headers of
one weight; its line in `_LAYOUTS` is all else. `docs/layouts.md` says what is read, and what was tried.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from lpconv.checkpoint.compressed import INPUT_SCALES, quantized_by
from lpconv.errors import UnsupportedError
from lpconv.forms.facts import Headers
from lpconv.forms.foreign import awq, compressed_tensors, fp8, gguf, gptq, modelopt, mxfp4
from lpconv.forms.foreign.gguf import Blocks
from lpconv.forms.foreign.grid import Grid

__all__ = ["ACTIVATIONS", "READ", "check_readable", "find", "is_part"]

_LAYOUTS = (compressed_tensors, fp8, mxfp4, modelopt, gptq, awq, gguf)
_BY_METHOD = {method: layout for layout in _LAYOUTS for method in layout.METHODS}

# The values of `quant_method` that are read.
READ = frozenset(_BY_METHOD)
# Last parts of names: what belongs to activations and caches, which no weight needs, and what is part of a weight.
ACTIVATIONS = frozenset(
    {*INPUT_SCALES, "input_zero_point", "output_scale", "output_zero_point", "activation_scale",
     "k_scale", "v_scale", "q_scale", "prob_scale"}
)  # fmt: skip
# What follows the name of a weight or of its module. Some of a model's own tensors end in these.
_ALSO_MODELS = ("_scale", "_shape", "_scales", ".scales")
_PARTS = ("_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_packed", "_g_idx", "_blocks", ".pre_quant_scale",
          ".qweight", ".qzeros", ".g_idx", *_ALSO_MODELS)  # fmt: skip


def find(name: str, headers: Headers) -> Grid | Blocks | None:
    """The weight whose codes are stored as `name`, None where that is none of the layout that the config names."""
    layout = _BY_METHOD.get(headers.quantised_by or "")
    found: Grid | Blocks | None = None if layout is None else layout.find(name, headers)
    return found if found is not None and found.agrees else None


def is_part(name: str, dtype: str, weights: Container[str]) -> bool:
    """Whether a tensor that no layout has can only be a part of a quantised weight."""
    for part in _PARTS:
        base = name.removesuffix(part)
        if base != name and (part not in _ALSO_MODELS or base in weights or base.endswith(".weight")):
            return True
    return dtype.startswith(("F8", "F6", "F4")) or (name.endswith(".weight") and dtype in ("U8", "I8"))


def _integer_bits(method: str | None, settings: object) -> Iterator[int]:
    """The widths of integers that a config names."""
    groups = compressed_tensors.weight_settings(settings) if method in compressed_tensors.METHODS else [settings]
    for group in groups if method in (*compressed_tensors.METHODS, *gptq.METHODS, *awq.METHODS) else ():
        bits = group.get("num_bits", group.get("bits", group.get("w_bit"))) if isinstance(group, dict) else None
        if isinstance(bits, int) and isinstance(group, dict) and group.get("type", "int") == "int":
            yield bits


def check_readable(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a checkpoint that somebody quantised in a way that is not read."""
    method = quantized_by(config)
    if method not in (None, "lpconv", *READ):
        raise UnsupportedError(
            f"the checkpoint is quantised by `{method}`, which lpconv does not read",
            hint="it reads " + ", ".join(sorted(READ)) + "; else start from the unquantised checkpoint",
        )
    settings = config.get("quantization_config")
    odd = {*_integer_bits(method, settings)} & {1, 3, 5, 6, 7}
    if odd:
        raise UnsupportedError(
            f"the weights are integers of {odd.pop()} bits, which lpconv does not read in the layout `{method}`",
            hint="start from the unquantised checkpoint",
        )
    if isinstance(settings, dict) and settings.get("quant_algo") == modelopt.SVD:
        raise UnsupportedError(
            f"the weights are quantised by ModelOpt's {modelopt.SVD}, which lpconv does not read: a part of each is "
            "the product of two thin matrices",
            hint="start from the unquantised checkpoint",
        )
