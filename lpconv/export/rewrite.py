"""Replace the fp32 weights of a graph by their stored form: short sums of scaled components.

Weights of the graph and tensors of the checkpoint are matched by value, not by name: an initializer is replaced only if
the stored form decodes to exactly its bits. So the result does not depend on how transformers renames tensors, tied
weights are stored once, and a mismatch leaves fp32 values in the graph instead of wrong ones.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnx_ir.tape import Tape
from torch import Tensor

from lpconv.export.options import integer_grid
from lpconv.formats.spec import FORMATS
from lpconv.forms.grid import Grid
from lpconv.layouts.reader import StoredTensors
from lpconv.results import FormatCount
from lpconv.storage.checkpoint import Checkpoint

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8)


@dataclass(frozen=True, kw_only=True)
class ComponentValues:
    """Codes of the weight's shape, and their scale: one factor, one per row, or, for integers, [rows, groups].

    `format` names the format of integer codes.
    """

    codes: Tensor
    scale: float | Tensor = 1.0
    format: str = ""

    @property
    def is_scaled(self) -> bool:
        """Whether the scale is something other than 1."""
        return isinstance(self.scale, Tensor) or self.scale != 1

    @property
    def value(self) -> Tensor:
        """codes · scale in fp32."""
        if not isinstance(self.scale, Tensor):
            return self.codes.float() * self.scale
        groups = self.codes.float().view(*self.scale.shape, -1)
        return (groups * self.scale.unsqueeze(-1)).view(self.codes.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the codes in bytes."""
        bits = _integer_dtype(self.format).bitwidth if self.format else 8 * self.codes.element_size()
        return self.codes.numel() * bits // 8


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One tensor of a checkpoint under its stored name."""

    name: str
    components: tuple[ComponentValues, ...]
    decoded_from: str | None = None  # description of a form that ONNX operators cannot decode

    @property
    def value(self) -> Tensor:
        """The weight in fp32, computed by the same operations in the same order as in the graph."""
        total = self.components[0].value
        for component in self.components[1:]:
            total = total + component.value
        return total

    @property
    def form(self) -> str:
        """Description of the form, such as ``e4m3fn × scale``."""
        names = (c.format or _DTYPE_NAMES[c.codes.dtype] for c in self.components)
        return " + ".join(n + (" × scale" if c.is_scaled else "") for n, c in zip(names, self.components, strict=True))

    @property
    def size_bytes(self) -> int:
        """Size of the codes of all components in bytes."""
        return sum(c.size_bytes for c in self.components)


_DTYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2",
}  # fmt: skip


def _integer_dtype(number: str) -> ir.DataType:
    """The narrowest dtype of a graph of opset 21 that holds integers of a format."""
    return ir.DataType.INT4 if FORMATS[number].bits <= 4 else ir.DataType.INT8


def stored_weights(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Every floating-point tensor of a checkpoint, one at a time, as the sum of its stored components.

    A graph cannot add Collage's integer residuals or multipoint rows, or apply the scales of blocks of floating-point
    codes: those weights are decoded to fp32.
    """
    with StoredTensors.open(checkpoint) as stored:
        for name, form in stored.forms.items():
            if (grid := integer_grid(form)) is not None:
                yield StoredWeight(name=name, components=(_integers(stored, grid),))
                continue
            components = tuple(ComponentValues(codes=codes, scale=factor) for codes, factor in stored.summands(name))
            dtype = components[0].codes.dtype
            if dtype in _FLOATS:
                is_stored = form.format is None or dtype == getattr(torch, form.format.torch or "", None)
                is_decoded = not is_stored and not any(c.is_scaled for c in components)
                yield StoredWeight(name=name, components=components, decoded_from=form.words if is_decoded else None)


def _integers(stored: StoredTensors, grid: Grid) -> ComponentValues:
    """The integer codes of a matrix, with a scale per group of a row."""
    side = stored.side(grid.name)
    (span,) = grid.spans(0, grid.num_elements)
    codes, scales = stored.read(grid, 0, grid.num_elements, side)
    scale = grid.scales_of(scales, span, side)
    return ComponentValues(codes=grid.codes.numbers(codes, span).to(torch.int8), scale=scale, format=grid.format.name)


def rewrite(
    model: ir.Model, parameters: Mapping[str, Tensor], stored: Iterable[StoredWeight]
) -> tuple[tuple[FormatCount, ...], tuple[str, ...], tuple[StoredWeight, ...]]:
    """Replace initializers by the stored form of the checkpoint. `parameters` are those of the exported model, in fp32.

    Stored tensors that the graph does not use, such as the pooler of a model without one, are left out. Returns counts
    by stored form, the parameters that no stored tensor decodes to, and the weights that are stored decoded.
    """
    waiting: dict[bytes, list[ir.Value]] = {}
    for name, value in model.graph.initializers.items():
        if name in parameters:
            waiting.setdefault(_key(parameters[name]), []).append(value)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    decoded: list[StoredWeight] = []
    for weight in stored:
        initializers = waiting.pop(_key(weight.value), [])
        if not initializers:
            continue
        decoded += [weight] if weight.decoded_from else []
        counts[weight.form] += 1
        sizes[weight.form] += weight.size_bytes
        if weight.form != "fp32":
            _replace(model.graph, initializers, weight)
    forms = tuple(FormatCount(form=f, num_tensors=n, size_bytes=sizes[f]) for f, n in counts.most_common())
    unmatched = tuple(v.name or "" for values in waiting.values() for v in values)
    return forms, unmatched, tuple(decoded)


def _key(x: Tensor) -> bytes:
    """A key that is equal for tensors of the same shape and elements; -0 and 0 count as equal."""
    digest = hashlib.sha256(repr(tuple(x.shape)).encode())
    digest.update((x.detach().contiguous() + 0.0).view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _replace(graph: ir.Graph, initializers: Sequence[ir.Value], weight: StoredWeight) -> None:
    """Replace every use of `initializers`, which hold the same weight, by the sum of its components."""
    name = initializers[0].name or ""
    for value in initializers:
        assert value.name is not None
        graph.initializers.pop(value.name)
    tape = Tape()
    total = _add_decoding(tape, name, weight.components[0])
    for component in weight.components[1:]:
        low = _add_decoding(tape, f"{name}_residual", component)
        total = _add_node(tape, "Add", [total, low], f"{name}_sum")
    ir.convenience.replace_all_uses_with(initializers, [total] * len(initializers))
    total.shape, total.type = initializers[0].shape, initializers[0].type
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.insert_before(graph[0], tape.nodes)


def _add_decoding(tape: Tape, name: str, component: ComponentValues) -> ir.Value:
    """The value of one component by DequantizeLinear, which runtimes recognise; for 16 and 32 bits by Cast and Mul."""
    scale = torch.as_tensor(component.scale, dtype=torch.float32)
    if component.format:
        integers = ir.tensor(component.codes.numpy(), dtype=_integer_dtype(component.format), name=name)
        inputs = [tape.initializer(integers), _add_tensor(tape, f"{name}_scale", scale)]
        # A scale per row is a group as well: ONNX Runtime 1.32 rounds the inputs of integers with a scale per row.
        size = component.codes.shape[1] // scale.shape[1]
        return _add_node(tape, "DequantizeLinear", inputs, f"{name}_add_decoding", axis=1, block_size=size)
    codes = _add_tensor(tape, name, component.codes)
    if component.codes.dtype in FLOAT8:
        zero = _add_tensor(tape, f"{name}_zero_point", torch.zeros(scale.shape, dtype=component.codes.dtype))
        inputs = [codes, _add_tensor(tape, f"{name}_scale", scale), zero]
        return _add_node(tape, "DequantizeLinear", inputs, f"{name}_add_decoding", axis=0)
    value = codes
    if component.codes.dtype != torch.float32:
        value = _add_node(tape, "Cast", [codes], f"{name}_cast", to=ir.DataType.FLOAT.value)
    if not component.is_scaled:
        return value
    scale = scale.unsqueeze(1) if scale.dim() else scale
    return _add_node(tape, "Mul", [value, _add_tensor(tape, f"{name}_scale", scale)], f"{name}_add_decoding")


def _add_tensor(tape: Tape, name: str, x: Tensor) -> ir.Value:
    return tape.initializer(tensor_adapters.TorchTensor(x.contiguous(), name))


def _add_node(tape: Tape, op: str, inputs: Sequence[ir.Value], name: str, **attributes: int) -> ir.Value:
    return tape.op(op, inputs, attributes, name=name, output=ir.Value(name=name))
