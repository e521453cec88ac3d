"""Communication between ranks under FSDP2: weights gathered for a layer, gradients reduced afterwards.

A sharded parameter is a DTensor whose part on each rank is a `ScaledTensor`. Its scale is static, so every rank knows
it, and only data are gathered: in the dtype of FSDP's policy, or as one byte each if the layer casts them to fp8
without another scale; the layer's own cast then gives the same codes again. Gradients have scales that differ between
ranks. They are summed as values, in fp32, whose range covers 16-bit numbers times a scale.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.functional import pad

from lpconv.errors import UnsupportedError
from lpconv.formats.codes import code_dtype
from lpconv.formats.spec import get_format
from lpconv.kernels.decode import decode
from lpconv.kernels.scaled_cast import scaled_codes
from lpconv.layers import linears
from lpconv.scaled.pair import Numerics, Role, Scaled, data_of


def rows_to_gather(
    x: Scaled, numerics: Numerics, module: nn.Module, dtype: torch.dtype, num_rows: int, num_ranks: int
) -> Tensor:
    """This rank's rows to send, in `dtype` or as codes, padded with zeros to equal parts.

    There are `num_rows` rows over `num_ranks` ranks. Raises UnsupportedError for scales that depend on data, and for
    fp16 parameters, since FSDP would keep their gradients in fp16 too.
    """
    if not isinstance(x.scale, float):
        raise UnsupportedError(
            "a sharded parameter needs a static scale, but this scale depends on data",
            hint="leave every:N out of `rescale`",
        )
    if x.data.dtype == torch.float16:
        raise UnsupportedError(
            "FSDP keeps gradients in the parameter's dtype, and fp16 cannot hold them without a scale",
            hint="use scaled(…, compute='fp16', carrier=torch.float32), MixedPrecisionPolicy(param_dtype=torch.float16,"
            " reduce_dtype=torch.float32)",
        )
    data = x.data.to(dtype)
    if _crosses_as_codes(x, numerics, module):
        assert numerics.operand is not None
        data = scaled_codes(data, None, get_format(numerics.operand), saturate=True)
    missing = math.ceil(num_rows / num_ranks) - len(data)
    sent = data.view(torch.uint8) if data.itemsize == 1 else data
    return pad(sent, (0, 0) * (sent.dim() - 1) + (0, missing)) if missing else sent.contiguous()


def gathered_rows(gathered: Tensor, numerics: Numerics, dtype: torch.dtype) -> Tensor:
    """The rows of all ranks in `dtype`: the gathered data, or its codes decoded, which is exact."""
    if gathered.dtype != torch.uint8:
        return gathered
    assert numerics.operand is not None
    return decode(gathered.view(code_dtype(numerics.operand)), dtype)


def _crosses_as_codes(x: Scaled, numerics: Numerics, module: nn.Module) -> bool:
    """Whether every product that reads this parameter casts it to fp8 without another scale."""
    scales = numerics.operand_scales
    is_cast = numerics.operand in ("e4m3fn", "e5m2") and {scales.output, scales.grad_input} == {"static"}
    is_matrix = x.role is Role.WEIGHT and x.data.dim() == 2
    return is_cast and is_matrix and any(layer.module is module and layer.is_replaceable for layer in linears(module))


def copy_to_reduce(op: OpOverload, pairs: list[Any], kwargs: dict[str, Any]) -> None:
    """FSDP's copy of gradient values into its reduction buffer, one row per rank.

    They are widened while copying and multiplied in the buffer, so that no further copy is made. Raises
    UnsupportedError for a buffer of fp16, in which small values would be 0.
    """
    gradients, *rest = pairs
    buffer: Tensor = kwargs["out"]
    if buffer.dtype == torch.float16:
        raise UnsupportedError(
            "FSDP sums gradients in fp16, which cannot hold them without a scale",
            hint="use MixedPrecisionPolicy(…, reduce_dtype=torch.float32)",
        )
    op([data_of(g) for g in gradients], *rest, **kwargs)
    num_ranks, start = len(buffer), 0
    for g in gradients:
        shape = data_of(g).shape
        width = math.ceil(shape[0] / num_ranks) * math.prod(shape[1:])
        if isinstance(g, Scaled):
            buffer[:, start : start + width].mul_(g.scale)
        start += width
