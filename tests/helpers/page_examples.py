"""A page of every kind with long names, many layers, all sections and invented figures."""

import math
import zlib
from dataclasses import replace

from lpconv.bench.roofline import roofline_verdict
from lpconv.report.advise import advice_document
from lpconv.report.bench import bench_document, compare_benches
from lpconv.report.compare import RunEntry, index_document
from lpconv.report.convert import compare_conversions, convert_document, summary
from lpconv.report.finetune import compare_finetunes, finetune_document
from lpconv.report.html import html
from lpconv.report.numbers import ROLE_WORDS
from lpconv.report.probe import probe_document
from lpconv.report.verify import verify_document
from lpconv.results import (
    AdviceResult,
    BenchResult,
    ComparedTensor,
    EvaluationRecord,
    FinetuneResult,
    FormatRates,
    GapRecord,
    GateRecord,
    HeldOutRecord,
    LayerChange,
    LayerPart,
    LogitsCheck,
    LossAllocation,
    LossScaleRecord,
    NonfiniteRecord,
    PeakMemory,
    ProbedRecord,
    ProbeReport,
    Recommendation,
    RunRecord,
    Series,
    UpdateQuality,
    Verification,
    WeightsCheck,
)
from tests.helpers.advice_examples import a_row, an_advice, gap
from tests.helpers.bench_records import CPU_PEAKS, GEMMS, row
from tests.helpers.report_examples import bert_result, llama_result

__all__ = ["bench", "example_pages", "finetune", "probe", "verification"]

LAYERS = tuple(
    f"bert.encoder.layer.{i}.{part}"
    for i in range(12)
    for part in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
)
STEPS = 60


def made_up(*name: object) -> float:
    """A number in [0, 1) that depends on the name only."""
    return zlib.crc32(repr(name).encode()) / 2**32


def _run(role: str, seed: int) -> RunRecord:
    steps = tuple(range(1, STEPS + 1))
    shift = 0.05 if role == "run" else 0.0
    losses = tuple(4.5 * math.exp(-s / 40) + shift + 0.1 * made_up(seed, s) for s in steps)
    at = (0, 15, 30, 45, STEPS)
    return RunRecord(
        role=role,
        seed=seed,
        losses=Series(name="loss", steps=steps, values=losses),
        evaluations=(
            Series(name="eval_loss", steps=at, values=tuple(4.6 * math.exp(-s / 40) + shift for s in at)),
            Series(name="eval_accuracy", steps=at, values=tuple(0.5 + s / 200 - shift for s in at)),
        ),
        loss_scales=Series(name="loss_scale", steps=steps, values=tuple(2.0 ** (15 if s < 20 else 14) for s in steps)),
        num_skipped=1,
        step_time_s=0.123,
        updates=tuple(UpdateQuality(step=s, edq=0.9, edq_weights=0.5, lost=0.1) for s in (1, 20, 40)),
        memory=PeakMemory(parts={"weights": 10**9, "other": 2 * 10**9}, measured_bytes=4 * 10**9, instrument="RSS"),
        first_nonfinite=NonfiniteRecord(step=20, layer=LAYERS[5], direction="backward", outcome="it was left out"),
        loss_allocation=LossAllocation(
            first_step=1, last_step=STEPS, num_batches=2, loss_before=4.5, loss_after=1.1, change=-3.4, rounding=0.01,
            rounding_share=0.003, closure_error=1e-5,
            layers=tuple(LayerChange(layer=n, change=-0.1, rounding=1e-4, helped=0.6) for n in LAYERS),
        ),
        held_out=tuple(
            EvaluationRecord(step=s, sizes=(8, 8), losses=(1.0, 2.0), accuracies=(0.5, 0.75)) for s in (0, STEPS)
        ),
    )  # fmt: skip


def finetune(**changes: object) -> FinetuneResult:
    """Two seeds of a classification with a twin and every kind of record."""
    made = FinetuneResult(
        name="bert-large-uncased-whole-word-masking",
        output="runs/bert-large-uncased-whole-word-masking-unit-fp8-collage-finetuned",
        recipe="unit-fp8-collage",
        twin="fp32",
        task="classification",
        facts={"Data": "reviews-of-long-films-2024.jsonl: 25000 texts, 97 held out, 2 classes", "Steps": "60"},
        runs=tuple(_run(role, seed) for seed in (0, 1) for role in ("run", "twin")),
        gaps=(
            GapRecord(metric="eval_loss", run=1.15, twin=1.1, gap=0.05, half_width=0.1, noise=0.01),
            GapRecord(metric="eval_accuracy", run=0.75, twin=0.8, gap=-0.05, standard_error=0.02),
        ),
        seconds=100.0,
        saved_as="unit e4m3fn",
        held_out=tuple(
            HeldOutRecord(
                role=role, metric=metric, num_examples=64, num_available=97, baseline=guess, before=before, after=after,
                standard_error=0.05, change_error=0.04,
            )
            for role in ("run", "twin")
            for metric, guess, before, after in (("eval_loss", 0.69, 4.6, 1.15), ("eval_accuracy", 0.64, 0.5, 0.75))
        ),
        gates=(GateRecord(expression="loss_gap<=0.01", value=0.05, passed=False),),
        command="lpconv finetune bert-large-uncased-whole-word-masking --recipe unit-fp8-collage --data reviews.jsonl",
        versions={"lpconv": "0.1.0", "torch": "2.13.0+cpu"},
        warnings=("the run passes over the training data 1.5 times",),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]  # any field


def probe() -> ProbeReport:
    """Four classes of tensor in three formats."""
    formats, classes = (
        ("fp16", "e4m3fn", "e5m2"),
        ("weight", "input", ROLE_WORDS["grad_output"], ROLE_WORDS["weight_grad"]),
    )

    def rates(layer: str, words: str, name: str) -> FormatRates:
        lost = made_up(layer, words, name) ** 10 / 2
        return FormatRates(
            format=name, log2_loss_scale=0, underflow=lost, subnormal=lost / 2, overflow=lost**4,
            sqnr_db=25.0 + 10 * made_up(name, layer), fits=lost < 1e-3, fits_own_scale=lost < 1e-2,
        )  # fmt: skip

    def tensor(layer: str, words: str) -> ProbedRecord:
        found = tuple(rates(layer, words, name) for name in formats)
        counts = tuple((e, round(1e6 * math.exp(-((e + 8) ** 2) / 30))) for e in range(-30, 8))
        return ProbedRecord(
            layer=layer, role=words.replace(" ", "_"), words=words, is_gradient="gradient" in words,
            num_elements=10**6, num_zero=10, num_nonfinite=0, exponents=counts, plain=found, scaled=found,
        )  # fmt: skip

    scale = LossScaleRecord(
        format="fp16", log2_scale=7, max_log2_scale=12, worst_underflow_before=0.6, worst_underflow_after=0.002
    )
    return ProbeReport(
        name="sentence-transformers/all-MiniLM-L6-v2", facts={"Model": "BertForMaskedLM", "Text": "corpus.txt"},
        formats=formats, classes=classes, steps_seen=4, steps_recorded=4, losses=(2.5, 2.25), overhead=0.125,
        tensors=tuple(tensor(layer, words) for layer in LAYERS for words in classes), loss_scales=(scale,),
        findings={"fp16": (f"output gradient of {LAYERS[0]}: 60 % underflow in fp16; 2^7 brings it to 0.2 %",)},
        warnings=("not in the checkpoint, so filled with random numbers: bert.pooler.dense.weight",),
    )  # fmt: skip


def bench() -> BenchResult:
    """A baseline and variants with names of every length, one of them skipped."""
    methods = ("static", "delayed", "tensor", "row", "mx", "scalify")
    rows = [row("plain"), *(row(m, ratio=(0.3 + i / 4, 0.2 + i / 4, 0.5 + i / 4)) for i, m in enumerate(methods))]
    rows.append(
        row(
            "te",
            status="skipped",
            reason="transformer_engine is not installed",
            ratio=(1, 1, 1),
            timing=None,
            memory=None,
        )
    )
    found = roofline_verdict(rows, GEMMS, CPU_PEAKS)
    assert found is not None
    return BenchResult(
        rows=tuple(rows), peaks=CPU_PEAKS, command="lpconv bench llama-8b --format bf16,fp8", verdicts=(found,),
        notes=("the machine was busy",), versions={"torch": "2.13.0+cpu"}, seconds=300.0,
    )  # fmt: skip


def example_pages() -> dict[str, str]:
    """The pages by kind."""
    converted, collage = bert_result(), bert_result("bf16", "collage")
    llama = replace(llama_result(), tensors=llama_result().tensors[:60])
    tuned = [finetune(), finetune(recipe="bf16")]
    documents = {
        "convert": convert_document(replace(converted, options={"rule": [], "residual": None, "keep": ["lm_head"]})),
        "convert-llama": convert_document(llama),
        "compare": compare_conversions([converted, collage, llama], ["minilm-unit-fp16", "minilm-collage", "llama"]),
        "probe": probe_document(probe()),
        "finetune": finetune_document(finetune()),
        "bench": bench_document(bench()),
        "finetunes": compare_finetunes(tuned, ["bert-large-unit-fp8-collage", "bf16"]),
        "benches": compare_benches([bench(), bench()], ["monday", "tuesday"]),
        "advice": advice_document(advice()),
        "verify": verify_document(verification()),
        "index": index_document(
            "runs", [_entry(name) for name in LAYERS[:5]], {"Conversions": "index-conversions.html"}
        ),
    }
    return {name: html(document) for name, document in documents.items()}


def verification() -> Verification:
    """Two checkpoints by their weights and on a text; a tensor that is wrong, one that is equal, a gate that failed."""
    tensors = [
        ComparedTensor(
            name=f"{name}.weight", stored_as="e2m1 codes with a scale per 16 of a row", reference="unchanged BF16",
            sqnr_db=math.inf if name == LAYERS[-1] else 3 + i / 2, max_rel_error=0.5,
            num_groups=2**15, num_off=5 // (i + 1),
            problem="3.0 dB, but 4 bits should give at least 8: wrong scales" if i == 0 else None,
        )
        for i, name in enumerate(LAYERS)
    ]  # fmt: skip
    return Verification(
        path="out/" + LAYERS[0], against="llama", command="lpconv verify", version="1",
        level="values", passed=False, tensors=tuple(tensors), problems=(f"`{tensors[0].name}`: {tensors[0].problem}",),
        weights=WeightsCheck(max_rel_error=0.5, min_sqnr_db=3.0, worst=tensors[0].name, num_tensors=len(tensors),
                             num_elements_checked=10**8, mismatched=(tensors[0].name,)),
        logits=LogitsCheck(max_abs_diff=3.2, rel_error=0.06, bit_equal=False, top1_agreement=0.914, mean_kl=0.0333,
                           reverse_kl=0.0338, perplexity=38.25, source_perplexity=36.75, model_class="LlamaForCausalLM",
                           inputs="text.txt, 512 tokens in windows of 64"),
        gates=(GateRecord(expression="kl<=0.01", value=0.0333, passed=False),),
    )  # fmt: skip


def advice() -> AdviceResult:
    """Candidates for both purposes: measured, failed, pruned and not reached, with long names."""
    rows = [a_row(f"multipoint e4m3fn, {i}.5 bits; {i} of 210 as they are", size_bytes=10**8 * (i + 3),
                  gap=gap(0.02 / 4**i, 0.01 / 4**i), meets=i > 1) for i in range(4)]  # fmt: skip
    trained = [a_row(name, purpose="train", settings={"recipe": name}, memory_bytes=10**9 * (i + 2),
                     gap=gap(0.004 * i, 0.01), meets=i == 1)
               for i, name in enumerate(("unit-fp8-collage", "collage-bf16", "amp-bf16"))]  # fmt: skip
    rest = (
        a_row("unit e5m2 rows", status="pruned", why="beaten by unit e4m3fn in size and weights", gap=None),
        a_row("unit fp16", status="unmeasured", why="left to try it", gap=None),
        a_row("mpt-fp8", purpose="train", status="failed", why="the loss is inf at step 3", gap=None, size_bytes=None),
    )
    advised = (
        Recommendation(
            purpose="infer", row=rows[2].name, words="Convert. " * 20, command=f"lpconv convert {LAYERS[0]}"
        ),
        Recommendation(
            purpose="train", row="collage-bf16", words="Train. " * 20, command="lpconv finetune " + "x " * 90
        ),
    )
    parts = tuple(
        LayerPart(tensor=f"{name}.weight", format="e4m3fn", bits=8.01, sqnr_db=31.5, divergence=made_up(name) / 99)
        for name in LAYERS[:10]
    )
    return an_advice(*rows, *trained, *rest, recommendations=advised, parts=parts, parts_of=rows[2].name,
                     unknowns=("Step times are not measured.",), warnings=("training was not tried",),
                     findings=("fp16: output gradient of lm_head: 86 % underflow; 2^28 brings it to 1 %",))  # fmt: skip


def _entry(name: str) -> RunEntry:
    return RunEntry(
        name=f"runs/{name}", kind="Conversions", what=name, found=summary(bert_result()),
        written="2026-01-02 03:04", link="x.html",
    )  # fmt: skip
