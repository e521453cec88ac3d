"""The on-disk layout of the compressed-tensors package, for e4m3fn with scales of tensors or rows: "float-quantized".

Codes lie under the weight's own name and shape, with a scale [1] or [rows, 1] under `NAME_scale`, and only in `Linear`
modules. Plain transformers with that package, and vLLM, open it without lpconv. The config names what is not quantised,
because a reader takes every other `Linear` for codes. (vllm-project/compressed-tensors,
`quantization/quant_config.py`.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["COMPRESSED_TENSORS", "LinearModules", "quantization_config", "quantized_by"]

COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True, kw_only=True)
class LinearModules:
    """The `Linear` modules of a model by name: `plain` are of that very class, `derived` of a subclass.

    A subclass may use its weight without calling it, so only the weights of plain ones can be codes.
    """

    plain: tuple[str, ...]
    derived: tuple[str, ...]

    @property
    def weights(self) -> frozenset[str]:
        """The names of the weights that can be codes."""
        return frozenset(f"{name}.weight" for name in self.plain)

    def without(self, quantised: Iterable[str]) -> tuple[str, ...]:
        """The modules whose weight is not among `quantised`: what `ignore` must name."""
        weights = set(quantised)
        return tuple(name for name in (*self.plain, *self.derived) if f"{name}.weight" not in weights)


def quantization_config(ignored: Iterable[str], *, rows: bool = False) -> dict[str, Any]:
    """The `quantization_config` of config.json; `ignored` are the names of `Linear` modules that are not quantised.

    With scales for `rows` it is the preset FP8_DYNAMIC, which asks readers to quantise inputs token by token: vLLM then
    multiplies in fp8. Without inputs it takes weights as they are, and one scale for a tensor is what it would change
    where it fuses modules.
    """
    strategy = "channel" if rows else "tensor"
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = {**weights, "strategy": "token", "dynamic": True} if rows else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` that config.json names, None for an unquantised checkpoint."""
    found = config.get("quantization_config")
    return str(found.get("quant_method", "another method")) if isinstance(found, dict) else None
