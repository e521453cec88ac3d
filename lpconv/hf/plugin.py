"""The transformers plug-in that opens lpconv's scaled checkpoints. It needs torch and transformers, and nothing else.

A converted weight is stored as codes of shape [1, *shape] under the weight's own name, with one fp32 scale of shape
[1] under `NAME_scale`; its value is codes · scale. Loading decodes into the dtype the model is opened with, so the
result is the stock model, and saving encodes again with the same scales: an untouched weight gives the same bytes.

This file is copied into each output as its loader module for `trust_remote_code=True`; keep it free of other imports.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["DecodeScaled", "LpconvConfig", "LpconvQuantizer", "encode_scaled", "register"]

METHOD = "lpconv"
LOADER = "lpconv_loader"
FORMAT_VERSION = 1
SCALE_SUFFIX = "_scale"
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


class LpconvConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped here
    """The `quantization_config` of a scaled checkpoint.

    `leaves` are the last name parts of converted tensors (``weight``, for nearly all), `exceptions` the tensors whose
    codes have another format than `format`.
    """

    def __init__(
        self,
        method: str = "unit",
        format: str = "fp16",
        scale: str = "pow2",
        leaves: list[str] | None = None,
        exceptions: dict[str, str] | None = None,
        format_version: int = FORMAT_VERSION,
        **kwargs: Any,
    ) -> None:
        if format_version > FORMAT_VERSION:
            raise ValueError(f"this checkpoint has lpconv format_version {format_version}; a newer lpconv opens it")
        self.quant_method = METHOD
        self.format_version = format_version
        self.method = method
        self.format = format
        self.scale = scale
        self.leaves = leaves or ["weight"]
        self.exceptions = exceptions or {}


class DecodeScaled(ConversionOps):  # type: ignore[misc]
    """codes [1, *shape] and scale [1] → weight. Tensors without a scale pass through."""

    def __init__(self, hf_quantizer: "LpconvQuantizer") -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        (leaf,) = target_patterns
        parts = {k.removesuffix("$"): v[0] if isinstance(v, list) else v for k, v in input_dict.items()}
        if leaf not in parts:
            raise ValueError(f"{full_layer_name} has a scale and no codes")
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        scale = parts.get(leaf + SCALE_SUFFIX)
        if scale is None:
            return {leaf: parts[leaf].to(dtype)}
        self.hf_quantizer.scales[full_layer_name] = float(scale)
        return {leaf: (parts[leaf][0].float() * scale).to(dtype)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodeScaled":
        """transformers copies the converter for every tensor; the scales must arrive at the one quantizer."""
        return self

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("saving encodes the whole state dict at once")


class LpconvQuantizer(HfQuantizer):  # type: ignore[misc]
    """Decodes on loading, encodes on saving. The model in between is the stock one, and trains like it."""

    def __init__(self, quantization_config: LpconvConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.scales: dict[str, float] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError("lpconv opens checkpoints that `lpconv convert` wrote; it does not convert while loading")

    def get_weight_conversions(self) -> list[WeightConverter]:
        leaves = sorted(self.quantization_config.leaves, key=len, reverse=True)
        # The ends are anchored: releases differ in whether `weight` would also match `weight_scale`.
        return [WeightConverter([f"{n}$", f"{n}{SCALE_SUFFIX}$"], n, [DecodeScaled(self)]) for n in leaves]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # The decoding is undone in `get_state_dict_and_metadata`, not by transformers' reversal of conversions.
        model._weight_conversions = [
            c
            for c in model._weight_conversions
            if not any(isinstance(op, DecodeScaled) for op in getattr(c, "operations", ()))
        ]
        # `save_pretrained` does not copy the loader module, so a saved config must not point to it.
        if LOADER in str(getattr(model.config, "auto_map", "")):
            del model.config.auto_map
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors with every weight that came as codes encoded again; tied weights stay one tensor."""
        state, encoded = {}, {}
        for name, tensor in model.state_dict().items():
            if name in self.scales:
                codes = encode_scaled(tensor.detach(), self.scales[name], DTYPES[self._format(name)])
                encoded[tensor.data_ptr()] = codes
                state[name + SCALE_SUFFIX] = torch.tensor([self.scales[name]], dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            state[name] = encoded.get(tensor.data_ptr(), tensor)
        return state, {}

    def _format(self, name: str) -> str:
        """The format of a parameter; its name and the stored one may differ by the base model's prefix."""
        for stored, fmt in self.quantization_config.exceptions.items():
            if stored == name or stored.endswith("." + name) or name.endswith("." + stored):
                return str(fmt)
        return str(self.quantization_config.format)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def encode_scaled(weight: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Codes [1, *shape] of a weight; numbers beyond the format's largest are clamped to it, NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return (weight.float() / scale).clamp(-limit, limit).to(dtype).unsqueeze(0)


def register() -> None:
    """Make transformers know `quant_method: lpconv`; doing so twice is harmless."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(LpconvConfig)
        register_quantizer(METHOD)(LpconvQuantizer)
