"""The plan of a conversion to GGUF: every tensor in one file, including those that other layouts leave as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.spec import FORMATS, OF_DTYPE
from lpconv.forms import FormSettings
from lpconv.forms.facts import ConvertedFacts
from lpconv.gguf import GGUF, WEIGHTS
from lpconv.gguf.arranged import TRANSPOSED, ArrangedSource
from lpconv.gguf.blocks import GgufNumbers
from lpconv.gguf.model import GgufModel, gguf_model
from lpconv.models.ties import find_ties
from lpconv.plan.options import FilledOptions, check_matches
from lpconv.plan.plan import OutputFile, Plan, PlannedShard, PlannedTensor
from lpconv.plan.policy import decide
from lpconv.report.numbers import code_list
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import Header, TensorInfo, lay_out
from lpconv.storage.source import Source
from lpconv.storage.staging import MARKER

_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class GgufPlan(Plan):
    """The plan of a GGUF file for `model`."""

    model: GgufModel

    @classmethod
    def of(cls, options: FilledOptions, model: GgufModel, tensors: Sequence[PlannedTensor]) -> Self:
        """The plan with all tensors in one file, in source order. Raises InputError for a tensor without a type."""
        stored = tuple(t for t in tensors if t.action != "tie")
        infos = lay_out(((c.name, c.dtype, c.shape) for t in stored for c in t.form.data), alignment=_ALIGNMENT)
        described = [(t.name, _type_of(t), info.shape) for t, info in zip(stored, infos, strict=True)]
        header = model.header(described, str(options.format))
        root = OutputFile(name=WEIGHTS, header=header, tensors=infos, alignment=_ALIGNMENT)
        shard = PlannedShard(root=root, residual=None, tensors=stored)
        return cls(options=options, tensors=tuple(tensors), shards=(shard,), orders=model.orders, model=model)

    @property
    def warnings(self) -> tuple[str, ...]:
        hidden = sorted(self.model.hidden)
        return (f"{code_list(hidden)}: llama.cpp has no such tensor, so the output lacks it",) if hidden else ()

    def with_tensors(self, tensors: Sequence[PlannedTensor]) -> Self:
        return self.of(self.options, self.model, tensors)

    def config_entries(self, converted: ConvertedFacts) -> dict[str, Any]:
        """The table by which lpconv finds the tensors of the file, as in views of other GGUF files."""
        (shard,), table = self.shards, {}
        for t, info in zip(shard.tensors, shard.root.tensors, strict=True):
            begin = len(shard.root.header)
            table[t.name] = {
                "name": self.model.names[t.name], "type": _type_of(t), "stored": list(t.form.shape),
                "shape": list(t.info.shape), "processed": False, "order": self.model.orders.get(t.name, ""),
                "begin": begin + info.begin, "end": begin + info.end,
            }  # fmt: skip
        return {"quantization_config": {"quant_method": GGUF, "tensors": table}}

    def header_problems(self, directory: Path, headers: Mapping[str, Header]) -> list[str]:
        (root,) = self.files
        with (directory / root.name).open("rb") as stored:
            is_same = stored.read(len(root.header)) == root.header
        return [] if is_same else [f"the header of `{root.name}` does not match the source and the conversion"]


def _type_of(t: PlannedTensor) -> str:
    if t.form.block_type is None:
        what = f"tensor `{t.name}` of the GGUF file has no format in {MARKER}"
        raise InputError(what, hint="download it again")
    return t.form.block_type


def plan_gguf(checkpoint: Checkpoint, source: Source, options: FilledOptions) -> tuple[Source, GgufPlan]:
    """The tensors of a source in the order of llama.cpp, and the plan of their file. Raises errors like `make_plan`."""
    infos = {n: e.info for n, e in source.entries.items()}
    model = gguf_model(checkpoint, {n: info.shape for n, info in infos.items()})
    source = ArrangedSource(source, model.orders, model.hidden)
    for pattern in options.patterns:
        check_matches(pattern, source.entries)
    ties = find_ties(source, checkpoint)
    tensors = [_plan_tensor(infos[n], options, model, ties.get(n)) for n in source.entries]
    return source, GgufPlan.of(options, model, tensors)


def _plan_tensor(info: TensorInfo, options: FilledOptions, model: GgufModel, tied_to: str | None) -> PlannedTensor:
    if tied_to is not None:
        return PlannedTensor.tied(info, tied_to)
    is_transposed = model.orders.get(info.name) == TRANSPOSED
    shape = info.shape[::-1] if is_transposed else info.shape
    form, reason = decide(replace(info, shape=shape), options)
    if info.name in model.in_full:
        form = GgufNumbers.of(info.name, shape, FORMATS["fp32"], FormSettings())
        reason = reason if len(shape) < 2 else "fp32 in llama.cpp"
    elif form.is_kept:
        if info.dtype not in ("F32", "F16", "BF16"):
            raise UnsupportedError(f"`{info.name}` is {info.dtype}, which GGUF cannot store", hint="exclude nothing")
        form = GgufNumbers.of(info.name, shape, OF_DTYPE[info.dtype], FormSettings())
    return PlannedTensor(info=info, form=form, reason=reason, is_transposed=is_transposed)
