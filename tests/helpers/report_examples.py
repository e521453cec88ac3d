"""Results to render: real names and shapes of a BERT and a Llama, with figures made up from the names.

The figures have the right size, are deterministic and differ per tensor; they are not measurements.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from lpconv.report.charts import Chart
from lpconv.report.document import Document, Section, Verdict
from lpconv.results import (
    ByteCounts,
    CalibrationRecord,
    ConvertResult,
    FileRecord,
    GateRecord,
    HashCheck,
    LogitsCheck,
    PlanResult,
    SourceRecord,
    TensorRecord,
    VerifyResult,
    WeightsCheck,
)

__all__ = [
    "bert_result", "bert_shapes", "blocks_of", "charts_of", "llama_result", "llama_shapes", "make_tensors", "plan_of",
    "section_of", "verdict_of",
]  # fmt: skip

T = TypeVar("T")
Shapes = dict[str, tuple[int, ...]]
_SQNR = {"fp16": 73.6, "bf16": 55.6, "e4m3fn": 31.5, "e5m2": 25.5, "fp32": math.inf}
_BYTES = {"fp16": 2, "bf16": 2, "e4m3fn": 1, "e5m2": 1, "fp32": 4}


def bert_shapes(layers: int = 6, width: int = 384) -> Shapes:
    """Names and shapes of a BERT encoder, as in all-minilm-l6-v2 by default."""
    wide = 4 * width
    shapes: Shapes = {
        "embeddings.position_ids": (1, 512),
        "embeddings.word_embeddings.weight": (30522, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{layer}.attention.{part}.weight": (width, width), f"{layer}.attention.{part}.bias": (width,)}
        shapes |= {f"{layer}.intermediate.dense.weight": (wide, width), f"{layer}.intermediate.dense.bias": (wide,)}
        shapes |= {f"{layer}.output.dense.weight": (width, wide), f"{layer}.output.dense.bias": (width,)}
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{layer}.{norm}.weight": (width,), f"{layer}.{norm}.bias": (width,)}
    return shapes | {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}


def llama_shapes(layers: int = 32) -> Shapes:
    """Names and shapes of a Llama with grouped-query attention: 9 tensors a layer."""
    width, wide, kv = 4096, 14336, 1024
    shapes: Shapes = {"model.embed_tokens.weight": (128256, width)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (width, width) for p in "qo"}
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (kv, width) for p in "kv"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (wide, width) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (width, wide)}
        shapes |= {f"{layer}.{p}_layernorm.weight": (width,) for p in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (128256, width)}


def _made_up(name: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on the name only."""
    return zlib.crc32((salt + name).encode()) / 2**32


def make_tensors(shapes: Shapes, fmt: str, *, scaled: bool, source_dtype: str = "F32") -> tuple[TensorRecord, ...]:
    """Records of a conversion to `fmt` that keeps 1-D tensors, and embeddings in fp16 where `fmt` has 8 bits."""
    return tuple(_tensor(name, shape, fmt, scaled, source_dtype) for name, shape in shapes.items())


def _tensor(name: str, shape: tuple[int, ...], fmt: str, scaled: bool, source_dtype: str) -> TensorRecord:
    size = math.prod(shape) * {"F32": 4, "BF16": 2}[source_dtype]
    if name.endswith("position_ids"):
        size = math.prod(shape) * 8
        return TensorRecord(
            name=name, shape=shape, source_dtype="I64", action="keep", format="I64", reason="not floating point",
            bytes_in=size, bytes_out=size,
        )  # fmt: skip
    rms = 0.02 + 0.05 * _made_up(name)
    absmax = rms * (4 + 30 * _made_up(name, "peak") ** 4)
    if len(shape) < 2:
        return TensorRecord(
            name=name, shape=shape, source_dtype=source_dtype, action="keep", format=source_dtype,
            reason="1-D: norms and biases keep their format", bytes_in=size, bytes_out=size, rms=rms, absmax=absmax,
        )  # fmt: skip
    outer = "embed" in name or "lm_head" in name
    stored, reason = ("fp16", "embedding or head: 16 bits") if outer and _BYTES[fmt] == 1 else (fmt, "matrix")
    flushed = int(math.prod(shape) * 4e-4 * _made_up(name, "zero")) if _BYTES[stored] == 1 else 0
    return TensorRecord(
        name=name, shape=shape, source_dtype=source_dtype, action="convert", format=stored, reason=reason,
        scale=math.ldexp(1.0, math.floor(math.log2(rms))) if scaled else None,
        bytes_in=size, bytes_out=math.prod(shape) * _BYTES[stored], rms=rms, absmax=absmax,
        sqnr_db=_SQNR[stored] - 1.5 * _made_up(name, "sqnr") ** 3, max_rel_error=1.0 if flushed else 4.8e-4,
        num_flushed=flushed,
    )  # fmt: skip


def _verified(tensors: tuple[TensorRecord, ...]) -> VerifyResult:
    worst = min((t for t in tensors if t.sqnr_db is not None), key=lambda t: t.sqnr_db or 0.0)
    return VerifyResult(
        level="logits",
        passed=True,
        hash=HashCheck(num_files=14),
        weights=WeightsCheck(
            max_rel_error=worst.max_rel_error or 0.0,
            min_sqnr_db=worst.sqnr_db or 0.0,
            worst=worst.name,
            num_tensors=sum(t.action == "convert" for t in tensors),
            num_elements_checked=1_310_720,
        ),
        logits=LogitsCheck(
            max_abs_diff=2.6e-4,
            rel_error=1.9e-4,
            bit_equal=False,
            top1_agreement=1.0,
            mean_kl=3.1e-8,
            model_class="BertModel",
            inputs="input_ids [4, 64] of the included text",
            is_text=True,
        ),
        gates=(GateRecord(expression="sqnr>=25", value=worst.sqnr_db, passed=True),),
    )


def bert_result(fmt: str = "fp16", method: str = "unit", **changes: Any) -> ConvertResult:
    """A finished conversion of all-minilm-l6-v2; `changes` replace fields of the record."""
    tensors = make_tensors(bert_shapes(), fmt, scaled=method != "collage")
    read, written = sum(t.bytes_in for t in tensors), sum(t.bytes_out for t in tensors)
    result = ConvertResult(
        method=method,
        format=fmt,
        residual="bf16" if method == "collage" else None,
        output=f"out/minilm-{method}-{fmt}",
        source=SourceRecord(
            name="sentence-transformers/all-MiniLM-L6-v2",
            resolved="sentence-transformers/all-MiniLM-L6-v2",
            revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
            files=(FileRecord(name="model.safetensors", size_bytes=90_868_376, sha256="53aa51172d14" + "0" * 52),),
        ),
        architecture="BertModel",
        tensors=tensors,
        files=(FileRecord(name="model.safetensors", size_bytes=written + 9000, sha256="1f" * 32),),
        side_files=("config.json", "tokenizer.json", "vocab.txt"),
        bytes=ByteCounts(read=read, written=written * (2 if method == "collage" else 1)),
        seconds=0.42,
        weights_seconds=0.42,
        peak_rss_bytes=388_000_000,
        verify=_verified(tensors),
        options={"scale": "pow2", "include": [], "exclude": [], "workers": 2, "verify": "auto"},
        versions={"lpconv": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        command=f"lpconv convert sentence-transformers/all-MiniLM-L6-v2 --method {method} --format {fmt}",
    )
    return replace(result, **changes)


def llama_result(fmt: str = "e4m3fn", layers: int = 32, **changes: Any) -> ConvertResult:
    """A finished conversion of a Llama-3-8B-shaped checkpoint: 291 tensors at 32 layers."""
    tensors = make_tensors(llama_shapes(layers), fmt, scaled=True, source_dtype="BF16")
    return bert_result(
        fmt,
        output=f"out/llama-unit-{fmt}",
        source=SourceRecord(name="llama-3-8b", resolved="meta-llama/Meta-Llama-3-8B", revision="main"),
        architecture="LlamaForCausalLM",
        tensors=tensors,
        bytes=ByteCounts(read=sum(t.bytes_in for t in tensors), written=sum(t.bytes_out for t in tensors)),
        seconds=21.3,
        weights_seconds=21.3,
        verify=_verified(tensors),
        warnings=("architecture `LlamaForCausalLM` has no size table; generic name rules were used",),
        **changes,
    )


def calibrated_result() -> ConvertResult:
    """A conversion with the largest input of every converted module."""
    result = llama_result(layers=1, method="unit", options={"granularity": "nvfp4", "layout": "compressed-tensors"})
    coded = [t for t in result.tensors if t.action == "convert"]
    absmax = {t.name.removesuffix(".weight"): 7.25 + i for i, t in enumerate(coded)}
    found = CalibrationRecord(text="plays.txt", sha256="ab" * 32, num_tokens=4096, seq_len=128, absmax=absmax)
    return replace(result, tensors=tuple(replace(t, scale=None) for t in result.tensors), calibration=found)


def plan_of(result: ConvertResult) -> PlanResult:
    """The plan that belongs to a result."""
    return PlanResult(
        method=result.method,
        format=result.format,
        output=result.output,
        source=result.source,
        tensors=result.tensors,
        bytes=result.bytes,
        shards=result.files,
        side_files=result.side_files,
        memory_bytes=260_000_000,
        disk_bytes=result.bytes.written,
        disk_free_bytes=512_000_000_000,
        seconds=0.4,
        workers=2,
        warnings=result.warnings,
    )


def verdict_of(document: Document) -> Verdict:
    """The verdict, where there has to be one."""
    assert document.verdict is not None
    return document.verdict


def section_of(document: Document, title: str) -> Section:
    """The only section with this title."""
    (section,) = (s for s in document.sections if s.title == title)
    return section


def blocks_of(document: Document, kind: type[T]) -> Iterator[T]:
    """All blocks of a kind, in order."""
    return (block for section in document.sections for block in section.blocks if isinstance(block, kind))


def charts_of(document: Document) -> dict[str, Chart]:
    """The charts by their titles."""
    return {chart.title: chart for chart in blocks_of(document, Chart)}
