"""Weights that stay codes in memory: a tensor subclass that holds the stored bytes and decodes them on use.

`CodedTensor` has the shape, dtype and place in the model of the decoded weight, so modules are those of transformers,
and its renaming, tying and stacking of experts work unchanged. A linear layer decodes blocks of rows and multiplies by
each, an embedding decodes the requested rows; every other op decodes the whole tensor for the duration of the op. The
decoding itself is done by the forms.

*Bits.* With a block of output rows each output is the sum of the same products in the same precision, but a BLAS may
sum them in another order for a matrix of another size: outputs of a linear layer in fp32 differ from those of the
decoded weight by less than 2K·2⁻²⁴·Σ|x||w| over the K inputs, and are mostly equal.

*Gradients.* Codes that require no gradient pass one on to their inputs: a linear layer decodes its blocks again in the
backward pass, so no decoded weight is alive between both passes. Block sums are added in fp32.

*Limits.* Codes have no gradient and cannot be written to. A backward pass that needs one raises UnsupportedError, and
so does every in-place op.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import local
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers.core_model_loading import WeightRenaming

from lpconv.errors import UnsupportedError
from lpconv.forms import Component, Stored
from lpconv.forms.blocks import buffer_view
from lpconv.kernels.buffers import Buffers
from lpconv.layouts.reader import StoredTensors
from lpconv.models.rounded_inputs import InputRounding
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS

_BLOCK = 2**18  # numbers that are decoded at once: they fit a core's cache
# Enough for the largest block in fp32: equal blocks of whole rows may have up to half more numbers.
_KEPT = Buffers(lambda device: (torch.empty(8 * _BLOCK, dtype=torch.uint8, device=device),))


class _Watches(local):
    """Functions to call before products in this thread."""

    def __init__(self) -> None:
        self.all: list[Callable[[Tensor, CodedTensor, bool], None]] = []


_WATCHES = _Watches()
_HINT = "open the model without resident=True to train or change it"


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """Numbers `start` to `stop` of a stored tensor. `parts` are its components by name.

    With `source`, which must stay open, the components are read from its files on use. With `inputs`, inputs of a
    product with the weight are rounded first.
    """

    form: Stored
    parts: Mapping[str, Tensor]
    start: int
    stop: int
    source: StoredTensors | None = None
    inputs: InputRounding | None = None

    @classmethod
    def from_form(cls, form: Stored, parts: Mapping[str, Tensor]) -> Self:
        """All numbers of a stored tensor."""
        return cls(form=form, parts=parts, start=0, stop=form.num_elements)

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.parts.values()), torch.device("cpu"))

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Codes":
        return replace(self, start=self.start + start, stop=self.start + stop)

    def to(self, device: torch.device) -> "Codes":
        return replace(self, parts={n: x.to(device) for n, x in self.parts.items()})

    def decode_to(self, out: Tensor) -> Tensor:
        """Decode into `out` (1-D), rounding from fp32 to its dtype."""
        if self.source is not None:
            return out.copy_(self.source.values(self.form.name, self.start, self.stop))
        form = self.form
        first, last = form.widened(self.start, self.stop)
        data = form.read(self.fetch, first, last, self.parts)
        if (first, last) == (self.start, self.stop):
            return form.decode_to(out, data, first, last, self.parts)
        decoded = form.decode(data, first, last, self.parts)
        return out.copy_(decoded[self.start - first : self.stop - first])

    def fetch(self, component: Component, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a component in memory, 1-D, in the dtype of the file."""
        first, last = (n * DTYPE_BITS[component.dtype] // 8 for n in (start, stop))
        raw = self.parts[component.name].reshape(-1).view(torch.uint8)[first:last]
        return raw.view(TORCH_DTYPES.get(component.dtype, torch.uint8))


class CodedTensor(torch.Tensor):
    """A weight that is decoded on use: `pieces` are its numbers in order, in whole rows."""

    pieces: tuple[Codes, ...]

    @staticmethod
    def __new__(cls, pieces: Iterable[Codes], shape: tuple[int, ...], dtype: torch.dtype) -> "CodedTensor":
        pieces = tuple(pieces)
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=pieces[0].device)
        tensor.pieces = pieces
        return tensor

    @classmethod
    def from_form(cls, form: Stored, parts: Mapping[str, Tensor], **further: Any) -> "CodedTensor":
        """Wrap a stored tensor, with values in fp32; `further` are fields of its `Codes`."""
        return cls((replace(Codes.from_form(form, parts), **further),), form.shape, torch.float32)

    @property
    def inputs(self) -> InputRounding | None:
        """How inputs of products with the weight are rounded; the same for all weights that were joined."""
        return self.pieces[0].inputs

    def times(self, x: Tensor) -> Tensor:
        """x Wᵀ, for `x` as it is; no watch is called."""
        return _Linear.apply(x, self, None)  # type: ignore[no-untyped-call, no-any-return]  # torch leaves apply untyped

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield decoded rows [rows, cols] in this dtype, block by block, with the index of each block's first row.

        A block is valid until the next one: all share one buffer per thread.
        """
        cols, row = self.shape[-1], 0
        for piece in self.pieces:
            unit = math.lcm(piece.form.cols, cols)  # block ends of the stored tensor, too
            step = -(-len(piece) // max(round(len(piece) / _BLOCK), 1) // unit) * unit
            inner = range(piece.start // unit * unit + step, piece.stop, step)
            for first, last in zip((piece.start, *inner), (*inner, piece.stop), strict=True):
                values = replace(piece, start=first, stop=last).decode_to(self._room(last - first))
                yield row, values.view(-1, cols)
                row += len(values) // cols

    def _room(self, count: int) -> Tensor:
        """A buffer for `count` numbers in this dtype, reused because repeated allocation fragments the heap."""
        (buffer,) = _KEPT.on(self.device)
        if count * self.dtype.itemsize > buffer.numel():
            return torch.empty(count, dtype=self.dtype, device=self.device)
        return buffer_view(buffer, count, self.dtype)

    def decode(self) -> Tensor:
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        out = torch.empty((self.numel() // self.shape[-1], self.shape[-1]), dtype=self.dtype, device=self.device)
        for row, values in self.blocks():
            out[row : row + len(values)] = values
        return out.view(self.shape)

    def part(self, start: int, stop: int, shape: tuple[int, ...]) -> "CodedTensor":
        ends = list(accumulate(len(p) for p in self.pieces))
        cut = [
            p.part(max(start - (end - len(p)), 0), min(stop - (end - len(p)), len(p)))
            for p, end in zip(self.pieces, ends, strict=True)
            if end > start and end - len(p) < stop
        ]
        return CodedTensor(cut, shape, self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # torch passes no contents for a subclass
        return f"CodedTensor({self.pieces[0].form.words}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> NoReturn:
        """Its presence makes `Module.to` exchange the whole tensor. Compilation is not possible."""
        raise UnsupportedError("weights that are kept as codes cannot be compiled", hint=_HINT)

    @staticmethod
    def __tensor_unflatten__(inner: object, context: object, size: object, stride: object) -> NoReturn:
        raise UnsupportedError("weights that are kept as codes cannot be compiled", hint=_HINT)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _BY_BLOCKS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if special is not None:
                return special(*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _AS_CODES.get(func)
        if special is not None and (result := special(*args, **kwargs)) is not None:
            return result
        if func in _PRODUCTS and isinstance(args[-1], CodedTensor):
            _tell_watches(args[-2], args[-1], is_transposed=True)
        if func._schema.is_mutable:
            raise UnsupportedError("a weight that is kept as codes cannot be written to", hint=_HINT)
        args, kwargs = tree_map_only(CodedTensor, CodedTensor.decode, (args, kwargs))
        return func(*args, **kwargs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: CodedTensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = flat.new_empty(len(flat), len(weight))
        for row, block in weight.blocks():
            y = out[:, row : row + len(block)]
            if bias is None:
                torch.mm(flat, block.t(), out=y)
            else:
                torch.addmm(bias[row : row + len(block)], flat, block.t(), out=y)
        ctx.weight = weight  # codes; `x` is not needed
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        weight, grad = ctx.weight, grads[0].reshape(-1, len(ctx.weight))
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_weight:
            _refuse_gradient(grad)
        total = None
        if needs_input:
            total = grad.new_zeros(len(grad), weight.shape[-1], dtype=torch.promote_types(grad.dtype, torch.float32))
            for row, block in weight.blocks():
                total += grad[:, row : row + len(block)] @ block
            total = total.to(grad.dtype).view(*grads[0].shape[:-1], -1)
        return total, None, grad.sum(0) if needs_bias else None


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise UnsupportedError("weights that are kept as codes have no gradient", hint=_HINT)


@contextmanager
def watched_products(watch: Callable[[Tensor, CodedTensor, bool], None]) -> Iterator[None]:
    """Call `watch` before every product of an input and a weight that this thread computes in the block.

    Its arguments are the input, the weight, and whether the weight is stored as [inputs, outputs], unlike `Linear`'s.
    """
    _WATCHES.all.append(watch)
    try:
        yield
    finally:
        _WATCHES.all.remove(watch)


def _tell_watches(x: Tensor, weight: CodedTensor, *, is_transposed: bool) -> None:
    for watch in _WATCHES.all:
        watch(x, weight, is_transposed)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, CodedTensor) or weight.ndim != 2 or isinstance(x, CodedTensor):
        return functional.linear(x, weight, bias)
    _tell_watches(x, weight, is_transposed=False)
    x = x if weight.inputs is None else weight.inputs(x)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return output


def _embedding(ids: Tensor, weight: Any, *args: Any, max_norm: float | None = None, **kwargs: Any) -> Tensor:
    """The rows for `ids`; the options in `args` and `kwargs` affect gradients only."""
    if max_norm is not None or args[1:2] not in ((), (None,)):
        raise UnsupportedError("an embedding with max_norm rewrites its rows, which codes do not allow", hint=_HINT)
    unique_ids, inverse = torch.unique(ids, return_inverse=True)
    if len(unique_ids) and not 0 <= unique_ids[0] <= unique_ids[-1] < len(weight):
        raise IndexError(f"ids from {int(unique_ids[0])} to {int(unique_ids[-1])} in a table of {len(weight)} rows")
    cols, runs = weight.shape[-1], []
    breaks = (unique_ids.diff() != 1).nonzero().view(-1) + 1
    for run in unique_ids.tensor_split(breaks.tolist()) if len(unique_ids) else ():
        first, count = int(run[0]), len(run)
        rows = weight.part(first * cols, (first + count) * cols, (count, cols))
        runs.append(rows.decode())
    table = torch.cat(runs) if runs else torch.empty(0, cols, dtype=weight.dtype, device=ids.device)
    return _require_grad_like(table[inverse], weight)


def _alias(x: CodedTensor, **_: Any) -> CodedTensor:
    return CodedTensor(x.pieces, tuple(x.shape), x.dtype)


def _to_copy(
    x: CodedTensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> CodedTensor | None:
    if dtype is not None and not dtype.is_floating_point:
        return None
    pieces = x.pieces if device in (None, x.device) else tuple(p.to(device) for p in x.pieces)
    return CodedTensor(pieces, tuple(x.shape), dtype or x.dtype)


def _getitem(x: Any, index: Any) -> Any:
    """One matrix of a stack as codes; anything else decoded."""
    is_one = type(index) is int or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype == torch.int64)
    if not isinstance(x, CodedTensor) or x.ndim < 3 or not is_one:
        return x[index]
    size, position = x.numel() // x.shape[0], range(x.shape[0])[int(index)]
    return _require_grad_like(x.part(position * size, (position + 1) * size, tuple(x.shape[1:])), x)


def _bmm(x: Any, weight: Any) -> Tensor:
    """The product with each matrix of a stack, one at a time, of rows that are not zero: others go to other experts."""
    if not isinstance(weight, CodedTensor) or isinstance(x, CodedTensor) or x.requires_grad:
        return torch.bmm(x, weight)
    out: Tensor = x.new_zeros(*x.shape[:-1], weight.shape[-1])
    for index, part in enumerate(x):
        rows, matrix = part.any(-1).nonzero().view(-1), _getitem(weight, index)
        if len(rows):
            out[index, rows] = torch.mm(part[rows], matrix).to(x.dtype)
        else:
            _tell_watches(part[rows], matrix, is_transposed=True)  # or batches cannot wait for each other
    return out


def _require_grad_like(derived: Tensor, weight: Tensor) -> Tensor:
    """Let a tensor derived from a weight require a gradient like that weight, so that a backward pass is refused."""
    return derived.requires_grad_(weight.requires_grad and torch.is_grad_enabled())


def _stack(tensors: list[Any], dim: int = 0) -> CodedTensor | None:
    if dim != 0 or not _all_coded(tensors):
        return None
    shape = (len(tensors), *tensors[0].shape)
    return CodedTensor((p for x in tensors for p in x.pieces), shape, tensors[0].dtype)


def _cat(tensors: list[Any], dim: int = 0) -> CodedTensor | None:
    """Concatenate rows, in each matrix of a stack."""
    if not _all_coded(tensors) or tensors[0].ndim < 2 or dim % tensors[0].ndim != tensors[0].ndim - 2:
        return None
    lead, pieces = math.prod(tensors[0].shape[:-2]), []
    for i in range(lead):
        for x in tensors:
            size = x.numel() // lead
            pieces += x.part(i * size, (i + 1) * size, tuple(x.shape[-2:])).pieces
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return CodedTensor(pieces, tuple(shape), tensors[0].dtype)


def _all_coded(tensors: list[Any]) -> bool:
    return all(isinstance(x, CodedTensor) for x in tensors)


_BY_BLOCKS: dict[Any, Any] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    Tensor.__getitem__: _getitem,
    torch.bmm: _bmm,  # experts of Llama 4
}
_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)  # of GPT-2's Conv1D, and of experts that are stored so
_AS_CODES: dict[Any, Any] = {
    _ATEN.detach.default: _alias,
    _ATEN.alias.default: _alias,
    _ATEN.clone.default: _alias,
    _ATEN._to_copy.default: _to_copy,
    _ATEN.stack.default: _stack,
    _ATEN.cat.default: _cat,
}


def save_as_codes(model: Any, others: Mapping[str, Tensor]) -> None:
    """Make a model's `state_dict` return the stored components of its codes, and make its codes refuse gradients.

    `others` are stored tensors that the model does not have, and that are saved with it.
    """
    renamings = [c for c in model._weight_conversions or () if isinstance(c, WeightRenaming)]

    def stored(module: Any, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        coded = [state.pop(n) for n, x in list(state.items()) if isinstance(x, CodedTensor)]
        parts = dict(others)
        for x in coded:
            assert isinstance(x, CodedTensor)
            for piece in x.pieces:
                parts.update(piece.parts)  # the same for tied weights
        for name, part in parts.items():
            for renaming in renamings:  # `save_pretrained` undoes them
                name, _ = renaming.rename_source_key(name)
            state[prefix + name] = part

    model._register_state_dict_hook(stored)
    for parameter in model.parameters():
        if isinstance(parameter, CodedTensor):
            parameter.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
