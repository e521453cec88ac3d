"""Weights that stay codes in memory: a tensor subclass that holds what lies in the file and decodes it as it is used.

`CodedTensor` has the shape, the dtype and the place in the model that the decoded weight would have, so modules are
those of transformers, and its renaming, tying and stacking of experts work as ever. A linear layer decodes blocks of
rows and multiplies by each, an embedding the rows that are asked for; every other op decodes the whole tensor for as
long as the op takes. Nothing decodes here but the forms themselves.

*Bits.* A block of output rows gives each output from the same products in the same precision, but a BLAS may sum them
in another order for a matrix of another size: outputs of a linear layer in fp32 are off those of the decoded weight by
less than 2K·2⁻²⁴·Σ|x||w| over the K inputs, and mostly equal.

*What is refused.* Codes have no gradient and cannot be written to. A backward pass that reaches one raises
UnsupportedError, and so does every op in place.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers.core_model_loading import WeightRenaming

from lpconv.errors import UnsupportedError
from lpconv.forms import Component, Stored
from lpconv.forms.blocks import room
from lpconv.forms.reader import StoredTensors
from lpconv.kernels.buffers import Buffers
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS

_BLOCK = 2**18  # numbers that are decoded at once: they stay in a cache of a core
# Room for the largest in fp32: matrices are cut into equal blocks, of up to half more numbers, and whole rows.
_KEPT = Buffers(lambda device: (torch.empty(8 * _BLOCK, dtype=torch.uint8, device=device),))
_HINT = "open the model without resident=True to train or change it"


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """Numbers `start` to `stop` of a stored tensor. `parts` are the stored tensors that it is made of, by name.

    With `source` they are in its files instead, and read as they are used.
    """

    form: Stored
    parts: Mapping[str, Tensor]
    start: int
    stop: int
    source: StoredTensors | None = None

    @classmethod
    def of(cls, form: Stored, parts: Mapping[str, Tensor]) -> Self:
        """The whole of a stored tensor."""
        return cls(form=form, parts=parts, start=0, stop=form.num_elements)

    @classmethod
    def in_files(cls, source: StoredTensors, name: str) -> Self:
        """The whole of a tensor of a checkpoint, of which nothing is read now."""
        form = source.forms[name]
        return cls(form=form, parts={}, start=0, stop=form.num_elements, source=source)

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.parts.values()), torch.device("cpu"))

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Codes":
        """The numbers `start` to `stop` of these."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def to(self, device: torch.device) -> "Codes":
        return replace(self, parts={n: x.to(device) for n, x in self.parts.items()})

    def decode_to(self, out: Tensor) -> Tensor:
        """Fill `out`, 1-D, with what the numbers are, rounded from fp32 to its dtype."""
        if self.source is not None:
            return out.copy_(self.source.values(self.form.name, self.start, self.stop))
        form = self.form
        first, last = form.widened(self.start, self.stop)
        data = form.read(self._fetch, first, last, self.parts)
        if (first, last) == (self.start, self.stop):
            return form.decode_to(out, data, first, last, self.parts)
        decoded = form.decode(data, first, last, self.parts)
        return out.copy_(decoded[self.start - first : self.stop - first])

    def _fetch(self, component: Component, start: int, stop: int) -> Tensor:
        first, last = (n * DTYPE_BITS[component.dtype] // 8 for n in (start, stop))
        raw = self.parts[component.name].reshape(-1).view(torch.uint8)[first:last]
        return raw.view(TORCH_DTYPES.get(component.dtype, torch.uint8))


class CodedTensor(torch.Tensor):
    """A weight that is decoded as it is used: `pieces` are its numbers in order, all rows whole."""

    pieces: tuple[Codes, ...]

    @staticmethod
    def __new__(cls, pieces: Iterable[Codes], shape: tuple[int, ...], dtype: torch.dtype) -> "CodedTensor":
        pieces = tuple(pieces)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=pieces[0].device)
        made.pieces = pieces
        return made

    @classmethod
    def whole(cls, form: Stored, parts: Mapping[str, Tensor]) -> "CodedTensor":
        """A stored tensor, with values in fp32."""
        return cls((Codes.of(form, parts),), form.shape, torch.float32)

    @classmethod
    def in_files(cls, source: StoredTensors, name: str) -> "CodedTensor":
        """A tensor of a checkpoint that stays in its files, open for as long as this is used; values in fp32."""
        return cls((Codes.in_files(source, name),), source.forms[name].shape, torch.float32)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Decoded rows [rows, cols] in this dtype, block by block, with the number of the first row of each.

        A block is gone when the next one is asked for: they share memory that this thread keeps.
        """
        cols, row = self.shape[-1], 0
        for piece in self.pieces:
            unit = math.lcm(piece.form.cols, cols)  # blocks end where those of the stored tensor do
            step = -(-len(piece) // max(round(len(piece) / _BLOCK), 1) // unit) * unit
            inner = range(piece.start // unit * unit + step, piece.stop, step)
            for first, last in zip((piece.start, *inner), (*inner, piece.stop), strict=True):
                values = replace(piece, start=first, stop=last).decode_to(self._room(last - first))
                yield row, values.view(-1, cols)
                row += len(values) // cols

    def _room(self, count: int) -> Tensor:
        """Memory for so many numbers in this dtype: kept, since a heap that gives and takes it grows by gaps."""
        (kept,) = _KEPT.on(self.device)
        if count * self.dtype.itemsize > kept.numel():
            return torch.empty(count, dtype=self.dtype, device=self.device)
        return room(kept, count, self.dtype)

    def decoded(self) -> Tensor:
        """The weight as a plain tensor."""
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        out = torch.empty((self.numel() // self.shape[-1], self.shape[-1]), dtype=self.dtype, device=self.device)
        for row, values in self.blocks():
            out[row : row + len(values)] = values
        return out.view(self.shape)

    def part(self, start: int, stop: int, shape: tuple[int, ...]) -> "CodedTensor":
        """The numbers `start` to `stop` in a shape of their own."""
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
        """That it is there makes `Module.to` exchange the whole tensor; compiling one is not possible."""
        raise UnsupportedError("weights that stay codes cannot be compiled", hint=_HINT)

    @staticmethod
    def __tensor_unflatten__(inner: object, context: object, size: object, stride: object) -> NoReturn:
        raise UnsupportedError("weights that stay codes cannot be compiled", hint=_HINT)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _BY_BLOCKS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if special is not None and not torch.is_autocast_enabled(args[0].device.type):
                return special(*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _AS_CODES.get(func)
        if special is not None and (found := special(*args, **kwargs)) is not None:
            return found
        if func._schema.is_mutable:
            raise UnsupportedError("a weight that stays codes cannot be written to", hint=_HINT)
        args, kwargs = tree_map_only(CodedTensor, CodedTensor.decoded, (args, kwargs))
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
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        _refuse_gradient(grads[0])


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise UnsupportedError("weights that stay codes have no gradient", hint=_HINT)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, CodedTensor) or weight.ndim != 2 or isinstance(x, CodedTensor):
        return functional.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return found


def _embedding(ids: Tensor, weight: Any, *args: Any, max_norm: float | None = None, **kwargs: Any) -> Tensor:
    """The rows of some ids; what `args` and `kwargs` say matters to gradients only."""
    if max_norm is not None or args[1:2] not in ((), (None,)):
        raise UnsupportedError("an embedding with a largest norm changes its rows, and codes stay", hint=_HINT)
    wanted, place = torch.unique(ids, return_inverse=True)
    cols, found = weight.shape[-1], []
    breaks = (wanted.diff() != 1).nonzero().view(-1) + 1
    for run in wanted.tensor_split(breaks.tolist()) if len(wanted) else ():
        first, count = int(run[0]), len(run)
        rows = weight.part(first * cols, (first + count) * cols, (count, cols))
        found.append(rows.decoded())
    table = torch.cat(found) if found else torch.empty(0, cols, dtype=weight.dtype)
    return _wanting(table[place], weight)


def _same(x: CodedTensor, **_: Any) -> CodedTensor:
    return CodedTensor(x.pieces, tuple(x.shape), x.dtype)


def _moved(
    x: CodedTensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> CodedTensor | None:
    if dtype is not None and not dtype.is_floating_point:
        return None
    pieces = x.pieces if device in (None, x.device) else tuple(p.to(device) for p in x.pieces)
    return CodedTensor(pieces, tuple(x.shape), dtype or x.dtype)


def _item(x: Any, index: Any) -> Tensor:
    """One of the matrices of a stack as codes, anything else decoded."""
    is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype == torch.int64)
    if not isinstance(x, CodedTensor) or x.ndim < 3 or not is_one:
        found: Tensor = x[index]
        return found
    size, at = x.numel() // x.shape[0], int(index) % x.shape[0]
    return _wanting(x.part(at * size, (at + 1) * size, tuple(x.shape[1:])), x)


def _wanting(made: Tensor, weight: Tensor) -> Tensor:
    """What was made of a weight, so that a gradient of it is refused as one of the weight is."""
    return made.requires_grad_(weight.requires_grad and torch.is_grad_enabled())


def _stack(tensors: list[Any], dim: int = 0) -> CodedTensor | None:
    """Matrices of one shape, one behind the other."""
    if dim != 0 or not _all_coded(tensors):
        return None
    shape = (len(tensors), *tensors[0].shape)
    return CodedTensor((p for x in tensors for p in x.pieces), shape, tensors[0].dtype)


def _cat(tensors: list[Any], dim: int = 0) -> CodedTensor | None:
    """Rows below rows, in each matrix of a stack."""
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


_BY_BLOCKS: dict[Any, Any] = {functional.linear: _linear, functional.embedding: _embedding, Tensor.__getitem__: _item}
_ATEN = torch.ops.aten
_AS_CODES: dict[Any, Any] = {
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.clone.default: _same,
    _ATEN._to_copy.default: _moved,
    _ATEN.stack.default: _stack,
    _ATEN.cat.default: _cat,
}


def save_as_codes(model: Any, others: Mapping[str, Tensor]) -> None:
    """Let the `state_dict` of a model hold what is stored of its codes, and its codes refuse gradients.

    `others` are stored tensors that the model does not have, and that are saved with it.
    """
    renamings = [c for c in model._weight_conversions or () if isinstance(c, WeightRenaming)]

    def stored(module: Any, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        coded = [state.pop(n) for n, x in list(state.items()) if isinstance(x, CodedTensor)]
        parts = dict(others)
        for x in coded:
            assert isinstance(x, CodedTensor)
            for piece in x.pieces:
                parts.update(piece.parts)  # of tied weights, the same
        for name, part in parts.items():
            for renaming in renamings:  # `save_pretrained` undoes them
                name, _ = renaming.rename_source_key(name)
            state[prefix + name] = part

    model._register_state_dict_hook(stored)
    for parameter in model.parameters():
        if isinstance(parameter, CodedTensor):
            parameter.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
