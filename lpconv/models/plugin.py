"""The transformers plug-in that opens lpconv's scaled checkpoints. It needs only torch and transformers.

A converted weight is stored as codes of shape [1, *shape] under the weight's own name, with one fp32 scale of shape [1]
under `NAME_scale`, or one scale per tile of its rows, shape [tiles along rows, tiles along columns], as numbers or as
bytes of exponents; its value is codes · scale. The config defines the tile, which is a row by default. Codes of few
bits are packed along the last axis, the first in the lowest bits. Loading decodes into the dtype that the model is
opened with, so the result is the stock model. Saving encodes again with the same scales: an unchanged weight gives the
same bytes, and a warning tells if more than a tenth of a change is lost.

Multipoint checkpoints also have weights whose rows are sums of points: `NAME_points` is the number of points of each
row, `NAME_scale` has one scale per point, and the codes are [1, points, bytes of a row]. Only a conversion can fit
these scales, so such a model cannot be saved as codes, only as plain weights after `model.dequantize()`.

Entropy-coded weights have bytes [1, bytes] of blocks in Pco's format, which the package pcodec decodes; `NAME_blocks`
has the bytes of each block of about 65,536 integers, in whole rows, and `NAME_shape` is an empty tensor [0, *shape].
Such a model, too, is saved as plain weights only.

This file is copied into each output as its loader module for `trust_remote_code=True`; keep it free of other imports.
"""

import math
import re
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    revert_weight_conversion,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

try:
    from pcodec import standalone as pco
except ImportError:  # only entropy-coded weights need it
    pco = None

__all__ = [
    "DecodeScaled",
    "LpconvConfig",
    "LpconvQuantizer",
    "ScaledConverter",
    "decode_blocks",
    "decode_points",
    "decode_scaled",
    "encode_scaled",
    "register",
]

METHOD = "lpconv"
LOADER = "lpconv_loader"
FORMAT_VERSION = 1
SCALE_SUFFIX = "_scale"
POINTS_SUFFIX = "_points"
BLOCKS_SUFFIX, SHAPE_SUFFIX, COLUMNS_SUFFIX = "_blocks", "_shape", "_columns"
MULTIPOINT = "multipoint"
CODED = "int16"  # integers that are entropy-coded
BLOCK = 2**16
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


# Rows and columns that share a scale, 0 for all of them, by name in the config.
TILES = {"row": (1, 0), "128x128": (128, 128), "mx": (1, 32)}
_WORDS = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # words of two neighbours, by the codes of each
# Values of codes of few bits, in the order of the codes.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NARROW_VALUES = {
    **{f"int{bits}": (*range(2 ** (bits - 1)), *range(-(2 ** (bits - 1)), 0)) for bits in range(2, 9)},
    "e2m1": (*_E2M1, *(-v for v in _E2M1)),
}
# The largest numbers that round to each e2m1 number but the last: ties go to the even code.
_E2M1_ENDS = (0.25, 0.75 - 2.0**-25, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0)


class LpconvConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped here
    """The `quantization_config` of a scaled checkpoint.

    `leaves` are the last name parts of converted tensors (mostly ``weight``), `exceptions` the tensors whose codes have
    another format than `format`. `granularity` is the part of a tensor that has its own scale.
    """

    def __init__(
        self,
        method: str = "unit",
        format: str = "fp16",
        scale: str = "pow2",
        granularity: str = "row",
        leaves: list[str] | None = None,
        exceptions: dict[str, str] | None = None,
        format_version: int = FORMAT_VERSION,
        **kwargs: Any,
    ) -> None:
        if format_version > FORMAT_VERSION:
            raise ValueError(f"this checkpoint has format_version {format_version} and needs a newer lpconv")
        self.quant_method = METHOD
        self.format_version = format_version
        self.method = method
        self.format = format
        self.scale = scale
        self.granularity = granularity
        self.leaves = leaves or ["weight"]
        self.exceptions = exceptions or {}


class ScaledConverter(WeightConverter):  # type: ignore[misc]
    """A converter that passes (stored name, tensor) pairs to its first operation, so that codes can find their scales.

    `model_converter` is the model's own converter that this one replaces, if any.
    """

    model_converter: WeightConverter | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stored_names: dict[str, list[str]] = {}

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        super().add_tensor(target_key, source_key, source_pattern, future)
        self.stored_names.setdefault(source_pattern, []).append(source_key)

    def materialize_tensors(self) -> dict[str, list[tuple[str, Tensor]]]:
        by_pattern = super().materialize_tensors()
        return {
            pattern: list(zip(self.stored_names[pattern], tensors, strict=True))
            for pattern, tensors in by_pattern.items()
        }


class DecodeScaled(ConversionOps):  # type: ignore[misc]
    """Decode codes with their scales and counts of points, in the stored order. Tensors without a scale are unchanged.

    It runs before the operations of the model's own converters: experts are decoded before they are merged.
    """

    def __init__(self, hf_quantizer: "LpconvQuantizer", *, merging: bool = False) -> None:
        self.hf_quantizer = hf_quantizer
        self.merging = merging

    def convert(
        self,
        input_dict: dict[str, list[tuple[str, Tensor]]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        decoded = {}
        for pattern, pairs in input_dict.items():
            tensors = dict(pairs)
            scales, counts, blocks = (
                {n.removesuffix(suffix): t for n, t in pairs if self.hf_quantizer.is_part(n, suffix)}
                for suffix in (SCALE_SUFFIX, POINTS_SUFFIX, BLOCKS_SUFFIX)
            )
            if missing := scales.keys() - tensors.keys():
                raise ValueError(f"{sorted(missing)} have scales but no codes")
            for name in scales.keys() & counts.keys():
                fmt = self.hf_quantizer.format_of(name)
                tensors[name] = decode_points(tensors[name][0], scales.pop(name), counts[name], fmt)
            for name in scales.keys() & blocks.keys():
                shape, columns = tensors[name + SHAPE_SUFFIX].shape[1:], tensors.get(name + COLUMNS_SUFFIX)
                tensors[name] = decode_blocks(tensors[name][0], scales.pop(name), blocks[name], shape, columns)
            for name, scale in scales.items():
                if self.merging:
                    self.hf_quantizer.merged_scales[name] = scale.cpu()
                else:
                    self.hf_quantizer.scales[full_layer_name] = scale.cpu(), self.hf_quantizer.format_of(name)
            for name in scales:
                tensors[name] = self._decode(name, tensors[name], scales[name]).to(dtype)
                self.hf_quantizer.samples[name if self.merging else full_layer_name] = _sample(tensors[name])
            decoded[pattern] = [
                tensors[name].to(dtype)
                for name, _ in pairs
                if not any(self.hf_quantizer.is_part(name, suffix) for suffix in self.hf_quantizer.suffixes)
            ]
        return decoded

    def _decode(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        return decode_scaled(codes, scale, self.hf_quantizer.format_of(name), self.hf_quantizer.tile)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodeScaled":
        """Returns itself: transformers copies the converter per tensor, but scales belong to one quantizer."""
        return self

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("lpconv can only save a whole state dict at once")


class LpconvQuantizer(HfQuantizer):  # type: ignore[misc]
    """Decodes on loading and encodes on saving. In between the model is the stock one, and trains like it."""

    def __init__(self, quantization_config: LpconvConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.scales: dict[str, tuple[Tensor, str]] = {}  # (scale, format of the codes) by the model's name
        self.merged_scales: dict[str, Tensor] = {}  # by stored name, for tensors that the model merges or splits
        self.samples: dict[str, Tensor] = {}  # of weights as opened, by the keys of the scales
        self._added: set[int] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError("lpconv cannot convert while loading; run `lpconv convert` first")

    def is_part(self, stored_name: str, suffix: str) -> bool:
        """Whether this is the side tensor of a weight with a suffix, which such checkpoints have."""
        return suffix in self.suffixes and stored_name.endswith(
            tuple(f"{leaf}{suffix}" for leaf in self.quantization_config.leaves)
        )

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all side tensors."""
        config = self.quantization_config
        if config.method == MULTIPOINT:
            return SCALE_SUFFIX, POINTS_SUFFIX
        is_coded = CODED in (config.format, *config.exceptions.values())
        return (SCALE_SUFFIX, BLOCKS_SUFFIX, SHAPE_SUFFIX, COLUMNS_SUFFIX) if is_coded else (SCALE_SUFFIX,)

    def update_weight_conversions(self, weight_conversions: list[WeightTransform], *args: Any) -> list[WeightTransform]:
        """Rename each scale like its codes, so that both reach one parameter, and decode before anything else."""
        leaves = sorted(self.quantization_config.leaves, key=len, reverse=True)
        renamings = [WeightRenaming(f"{leaf}{suffix}$", leaf) for leaf in leaves for suffix in self.suffixes]
        converters = [self._decode_first(c) if isinstance(c, WeightConverter) else c for c in weight_conversions]
        renamed_leaves = _renamed_leaves(leaves, weight_conversions)
        plain = [
            ScaledConverter(leaf, leaf, [DecodeScaled(self)]) for leaf in dict.fromkeys((*leaves, *renamed_leaves))
        ]
        self._added = {id(t) for t in (*renamings, *plain)}
        return [*renamings, *converters, *plain]

    def _decode_first(self, converter: WeightConverter) -> ScaledConverter:
        sources, targets = list(converter._original_source_patterns), list(converter._original_target_patterns)
        scaled = ScaledConverter(sources, targets, [DecodeScaled(self, merging=True), *converter.operations])
        # The part of the model that a converter applies to; releases differ in these attributes.
        for name in ("scope_prefix", "base_model_prefix", "force_cpu"):
            if hasattr(converter, name):
                setattr(scaled, name, getattr(converter, name))
        scaled.model_converter = converter
        return scaled

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        # transformers 5.17 would cast codes to the model's dtype, which rounds a second time.
        plan, stored = model._get_dtype_plan, {f"*{leaf}": None for leaf in self.quantization_config.leaves}
        model._get_dtype_plan = lambda dtype: {**stored, **plan(dtype)}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del model._get_dtype_plan
        # The decoding is undone in `get_state_dict_and_metadata`, not by transformers' reversal of conversions.
        model._weight_conversions = [
            getattr(c, "model_converter", None) or c for c in model._weight_conversions if id(c) not in self._added
        ]
        # `save_pretrained` does not copy the loader module, so a saved config must not point to it.
        if LOADER in str(getattr(model.config, "auto_map", "")):
            del model.config.auto_map
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors, with every weight that was stored as codes encoded again; tied weights stay one tensor.

        transformers renames the result back to the names of the checkpoint. Merged experts, which it would also split,
        are split here, since codes belong to the stored tensors.
        """
        if len(self.suffixes) > 1:
            raise ValueError(
                "points and entropy-coded integers are fitted to a budget by `lpconv convert`, not while saving; call "
                "`model.dequantize()` first to save the weights as they are"
            )
        tensors, lost = model.state_dict(), dict[str, float]()
        merged = self._merged_parameters(model, tensors)
        state, encoded = {}, {}
        back = [c.reverse_transform() for c in model._weight_conversions or () if isinstance(c, WeightRenaming)][::-1]
        for name, (scale, fmt) in self.scales.items():
            encoded[tensors[name].data_ptr()] = self._encode(name, tensors[name], scale, fmt, lost)
            stored, beside = _rename(name, back) + SCALE_SUFFIX, name + SCALE_SUFFIX
            state[beside if _rename(beside, back) == stored else stored] = scale  # a renamed last part loses the suffix
        for name, tensor in tensors.items():
            if name not in merged:
                state[name] = encoded.get(tensor.data_ptr(), tensor)
        renamings = [c for c in model._weight_conversions or () if isinstance(c, WeightRenaming)]
        for stored, tensor in revert_weight_conversion(model, merged).items():
            name = _rename(stored, renamings)  # transformers will undo it
            if stored not in self.merged_scales:
                state[name] = tensor
                continue
            scale = self.merged_scales[stored]
            state[name] = self._encode(stored, tensor, scale, self.format_of(stored), lost)
            state[name + SCALE_SUFFIX] = scale
        if lost and (share := max(lost.values())) > 0.1:
            name = next(n for n in lost if lost[n] == share)
            words = (
                f"saving as codes loses {share:.0%} of the change of `{name}` since opening, and part of other changes"
            )
            warnings.warn(f"{words}; `model.dequantize()` before saving keeps them", stacklevel=2)
        return state, {}

    def _merged_parameters(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that the model's own converters build from other stored tensors, if those were codes."""
        if not self.merged_scales:
            return {}
        back = [c.reverse_transform() for c in model._weight_conversions if isinstance(c, WeightConverter)]
        return {n: t for n, t in tensors.items() if any(c.rename_source_key(n)[1] is not None for c in back)}

    def _encode(self, name: str, weight: Tensor, scale: Tensor, fmt: str, lost: dict[str, float]) -> Tensor:
        """The codes of a weight; `lost` gets the share of its change, in the 2-norm, that they lose."""
        codes = encode_scaled(weight.detach(), scale, fmt, self.tile)
        now, before = _sample(weight), self.samples[name]
        if not torch.equal(now, before):
            kept = _sample(decode_scaled(codes, scale.to(codes.device), fmt, self.tile).to(weight.dtype))
            lost[name] = float((now - kept).norm() / (now - before).norm())
        return codes

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale, 0 for all of them."""
        kind, _, count = self.quantization_config.granularity.partition(":")
        return (1, int(count)) if count else TILES[kind]

    def format_of(self, name: str) -> str:
        """The format of a stored tensor, whose name may or may not have the base model's prefix."""
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


def _sample(weight: Tensor) -> Tensor:
    """About 4096 elements from all over a weight, fp32; an odd step meets every column."""
    return weight.detach().reshape(-1)[:: weight.numel() // 4096 | 1].to("cpu", torch.float32, copy=True)


def _rename(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _renamed_leaves(leaves: list[str], conversions: list[WeightTransform]) -> list[str]:
    """The last name parts that a model's renamings give to tensors with one of `leaves` (GraniteMoE's experts)."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    pairs = (p for c in renamings for p in zip(c._original_source_patterns, c._original_target_patterns, strict=False))
    last = ([re.split(r"\W+", pattern)[-1] for pattern in pair] for pair in pairs)
    return [target for source, target in last if source in leaves and target]


def decode_points(codes: Tensor, scales: Tensor, counts: Tensor, fmt: str) -> Tensor:
    """The fp32 weight [*counts.shape, cols] whose row r is the sum of its counts[r] points, each codes · scale."""
    left = counts.reshape(-1).long()
    at = left.cumsum(0) - left
    rows = torch.arange(left.numel(), device=left.device)
    values = torch.empty(0, device=codes.device)
    while rows.numel():
        part = _point_values(codes, at, fmt) * scales[at].unsqueeze(1)
        if values.numel():
            values[rows] += part
        else:
            values = part
        more = left > 1
        rows, at, left = rows[more], at[more] + 1, left[more] - 1
    return values.reshape(*counts.shape, -1)


def decode_blocks(
    coded: Tensor, step: Tensor, sizes: Tensor, shape: tuple[int, ...], factors: Tensor | None = None
) -> Tensor:
    """The fp32 weight of `shape` from blocks of entropy-coded integers; `sizes` are their bytes.

    `factors` of the step, for the columns of each matrix, also give the order of columns in a block.
    """
    if pco is None:
        raise ImportError(
            "these weights are entropy-coded: install the package that decodes them, `pip install pcodec`"
        )
    codes, raw, at = torch.empty(math.prod(shape), dtype=torch.int16), coded.cpu().numpy(), 0
    rows = codes.view(-1, shape[-1])
    count = max(BLOCK // shape[-1], 1) if factors is None else -(-len(rows) // max(len(sizes), 1))  # rows of a block
    for index, (size, block) in enumerate(zip(sizes.tolist(), torch.split(rows, count), strict=True)):
        out = block.numpy().reshape(-1)
        done = 0
        with suppress(RuntimeError):
            done = pco.simple_decompress_into(raw[at : at + size].tobytes(), out).n_processed
        if done != len(out):
            raise ValueError("a block of entropy-coded integers is damaged; download the checkpoint again")
        at += size
        if factors is not None:
            own = factors.cpu().view(torch.uint8).view(-1, shape[-1])[index * count // shape[-2]]
            block.copy_(block.view(shape[-1], -1)[own.argsort(stable=True).argsort()].T)
    steps = step if factors is None else (factors.float() * step).unsqueeze(-2)
    return codes.to(coded.device).view(shape) * steps.to(coded.device)


def _point_values(codes: Tensor, rows: Tensor, fmt: str) -> Tensor:
    """Decode rows of codes [points, bytes] to fp32."""
    raw = codes.view(torch.uint8)[rows]
    return raw.view(DTYPES[fmt]).float() if fmt in DTYPES else _narrow_values(raw, fmt)


def _narrow_values(raw: Tensor, fmt: str, first: int = 0) -> Tensor:
    """Decode bytes [rows, bytes] with codes of few bits to fp32; `first` is the code that is stored as 0."""
    table = torch.tensor(NARROW_VALUES[fmt], dtype=torch.float32, device=raw.device).roll(-first)
    return table[_unpack(raw, table.numel().bit_length() - 1).long()]


def decode_scaled(codes: Tensor, scale: Tensor, fmt: str, tile: tuple[int, int]) -> Tensor:
    """Decode codes [1, *shape], packed along the last axis, to fp32 with their scales: [1], or one per tile."""
    rows = codes.reshape(-1, codes.shape[-1])
    if fmt in DTYPES:
        values = rows.float()
    elif codes.dtype == torch.int32:  # words of integers, plus half of their range so that none is negative
        values = _narrow_values(rows.view(torch.uint8), fmt, max(NARROW_VALUES[fmt]) + 1)
    else:
        values = _narrow_values(rows, fmt)
    return (values * _expand_scale(scale, tile, values)).reshape(*codes.shape[1:-1], -1)


def encode_scaled(weight: Tensor, scale: Tensor, fmt: str, tile: tuple[int, int]) -> Tensor:
    """Encode a weight; numbers beyond the format's largest are clamped to it, and NaN is kept if the format has NaN."""
    rows = weight.float().reshape(-1, weight.shape[-1])
    unit = rows / _expand_scale(scale.to(weight.device), tile, rows)
    if fmt in DTYPES:
        limit = torch.finfo(DTYPES[fmt]).max
        return unit.clamp(-limit, limit).to(DTYPES[fmt]).reshape(1, *weight.shape)
    if fmt == "e2m1":
        code = torch.bucketize(unit.abs(), torch.tensor(_E2M1_ENDS, device=unit.device))
        return _pack((code + 8 * torch.signbit(unit)).byte(), 4).reshape(1, *weight.shape[:-1], -1)
    half = max(NARROW_VALUES[fmt]) + 1
    codes = unit.clamp(-half, half - 1).round().add(half).byte()
    return _pack(codes, half.bit_length()).view(torch.int32).reshape(1, *weight.shape[:-1], -1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, one per byte, without gaps into bytes: neighbours are joined until their bits are whole bytes."""
    words, count = codes.reshape(-1), 1
    while bits * count % 8:
        words = words.view(_WORDS[count])
        words = words - (words >> 8 * count) * ((1 << 8 * count) - (1 << bits * count))
        count *= 2
    return words.view(torch.uint8).view(-1, count)[:, : bits * count // 8].contiguous().view(len(codes), -1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of packed rows, one per byte."""
    count = 8 // math.gcd(bits, 8)  # codes that fill whole bytes
    groups = packed.reshape(-1, bits * count // 8)
    words = torch.nn.functional.pad(groups, (0, count - groups.shape[-1])).flatten()
    while count > 1:
        count //= 2
        words = words.view(_WORDS[count])
        words = words + (words >> bits * count) * ((1 << 8 * count) - (1 << bits * count))
    return words.view(torch.uint8).view(len(packed), -1)


def _expand_scale(scale: Tensor, tile: tuple[int, int], like: Tensor) -> Tensor:
    """Expand scales so that they broadcast to rows."""
    if scale.dim() == 1:
        return scale.reshape(1, 1)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu).float()
    height, width = tile
    if height > 1:
        scale = scale.repeat_interleave(height, 0)[: like.shape[0]]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, : like.shape[1]]


def register() -> None:
    """Register `quant_method: lpconv` with transformers; may be called more than once."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(LpconvConfig)
        register_quantizer(METHOD)(LpconvQuantizer)
