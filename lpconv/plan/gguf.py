"""The plan of a conversion to GGUF: every tensor in one file, including those that other layouts leave as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.forms import Kept
from lpconv.forms.gguf_blocks import GgufBlocks, GgufNumbers
from lpconv.forms.rounded import Rounded
from lpconv.gguf import GGUF, WEIGHTS
from lpconv.plan.options import ConvertOptions, check_matches
from lpconv.plan.plan import OutputFile, Plan, PlannedShard, PlannedTensor
from lpconv.plan.policy import decide
from lpconv.storage.arranged import TRANSPOSED
from lpconv.storage.header import TensorInfo, lay_out

if TYPE_CHECKING:
    from lpconv.gguf.model import GgufModel

_ALIGNMENT = 32
_SAME = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def make_gguf_plan(
    infos: Mapping[str, TensorInfo], options: ConvertOptions, model: "GgufModel", *, ties: Mapping[str, str]
) -> Plan:
    """The plan for source tensors, by name; `ties` maps dropped names to kept ones. Raises errors like `make_plan`."""
    for pattern in options.patterns:
        check_matches(pattern, infos)
    tensors = tuple(_plan_tensor(info, options, model, ties.get(n)) for n, info in infos.items())
    return Plan(options=options, tensors=tensors, shards=(gguf_shard(tensors, options, model),), gguf=model)


def gguf_config(plan: Plan) -> dict[str, Any]:
    """The table in config.json by which lpconv finds the tensors of the file, as in views of other GGUF files."""
    assert plan.gguf is not None
    (shard,), table = plan.shards, {}
    for t, info in zip(shard.tensors, shard.root.tensors, strict=True):
        begin = len(shard.root.header)
        table[t.name] = {
            "name": plan.gguf.names[t.name], "type": _type(t), "stored": list(t.form.shape),
            "shape": list(t.info.shape), "processed": False, "order": plan.gguf.orders.get(t.name, ""),
            "begin": begin + info.begin, "end": begin + info.end,
        }  # fmt: skip
    return {"quantization_config": {"quant_method": GGUF, "tensors": table}}


def _plan_tensor(info: TensorInfo, options: ConvertOptions, model: "GgufModel", tied_to: str | None) -> PlannedTensor:
    if tied_to is not None:
        return PlannedTensor.tied(info, tied_to)
    shape = info.shape[::-1] if model.orders.get(info.name) == TRANSPOSED else info.shape
    form, reason = decide(replace(info, shape=shape), options)
    if info.name in model.in_full:
        form = GgufNumbers(name=info.name, shape=shape, format=FORMATS["fp32"])
        reason = reason if len(shape) < 2 else "fp32 in llama.cpp"
    elif isinstance(form, Kept):
        if form.dtype not in _SAME:
            raise UnsupportedError(f"`{info.name}` is {form.dtype}, which GGUF cannot store", hint="exclude nothing")
        form = GgufNumbers(name=info.name, shape=shape, format=FORMATS[_SAME[form.dtype]])
    return PlannedTensor(info=info, form=form, reason=reason)


def gguf_shard(planned: Sequence[PlannedTensor], options: ConvertOptions, model: "GgufModel") -> PlannedShard:
    """The only file of the layout, with tensors in source order."""
    tensors = tuple(t for t in planned if t.action != "tie")
    infos = lay_out(((c.name, c.dtype, c.shape) for t in tensors for c in t.form.data), alignment=_ALIGNMENT)
    described = [(t.name, _type(t), info.shape) for t, info in zip(tensors, infos, strict=True)]
    header = model.header(described, str(options.format))
    root = OutputFile(name=WEIGHTS, header=header, tensors=infos, alignment=_ALIGNMENT)
    return PlannedShard(root=root, residual=None, tensors=tensors)


def _type(t: PlannedTensor) -> str:
    form = t.form.inner if isinstance(t.form, Rounded) else t.form
    assert isinstance(form, (GgufBlocks, GgufNumbers)), form
    return form.type
