"""Model cards: how to open the output, what was measured, how it was made."""

import dataclasses
import math
import re
from pathlib import PurePath

from lpconv.formats.spec import CODED
from lpconv.layouts import LAYOUTS
from lpconv.report.convert import RUN_FIGURES, auto_class, figures, form_name, opening_blocks, scale_words, summary
from lpconv.report.document import Block, Code, Document, Prose, Section, Table, section, sections_of
from lpconv.report.finetune import diagnostics, gap_table, held_out_table, held_out_words, title, verdict
from lpconv.report.numbers import MISSING
from lpconv.report.tensors import action_groups, action_row, converted_tensors, worst_table
from lpconv.report.verify import verification_section
from lpconv.results import ConvertResult, FinetuneResult

_TAGS = {"unit": "unit-scaling", "scalify": "scalify", "collage": "collage"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WORST = 5


_REFUSED = (
    "Plain transformers refuses these weights on purpose. The codes are useless without their scales, so they are "
    "stored with one more axis than the model's weights, and loading them without lpconv ends in a size "
    "mismatch."
)
_AUTO_BY_TASK = {
    "mlm": "AutoModelForMaskedLM",
    "clm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def model_card(result: ConvertResult) -> Document:
    """The card of a converted model: what it is, how to open it, what was measured, how to restore the original.

    It contains no times, memory or paths, so that converting again gives the same card.
    """
    source = result.source.resolved if _is_hub_id(result) else result.source.name
    # The figures that do not change when the model is converted again.
    lasting = ((k, v) for k, v in figures(result).items() if k not in RUN_FIGURES and v != MISSING)
    return Document(
        kind="card",
        title=f"{result.source.name}: {form_name(result)}",
        summary=summary(result),
        sections=sections_of(
            section("How to open it", *_open_converted(result)),
            section("What was measured", Table(columns=("figure", "value"), rows=tuple(lasting))),
            _tensor_section(result),
            verification_section(result.verify),
            section(
                "How to get the original back",
                Code(lines=("lpconv restore PATH -o ORIGINAL",)),
                f"writes a plain checkpoint: kept tensors bit for bit, converted ones {_fidelity(result)}.",
            ),
        ),
        warnings=result.warnings,
        facts={"source": source, "revision": result.source.revision or MISSING},
        versions=result.versions,
        command=result.command,
        front_matter=_conversion_header(result),
    )


def _conversion_header(result: ConvertResult) -> dict[str, object]:
    library = "transformers" if result.method == "collage" else "lpconv"
    layout = LAYOUTS[result.options["layout"]] if _is_foreign(result) else None
    header: dict[str, object] = {"library_name": library if layout is None else layout.library}
    if _is_hub_id(result):
        header["base_model"] = result.source.resolved
    header |= result.card
    if "base_model" in header:
        header["base_model_relation"] = "quantized"
    methods = [_TAGS.get(part, part) for part in result.method.split("+")]
    own = ["lpconv", *methods] if layout is None else [layout.tag]
    kind = "entropy-coded" if result.format == CODED.name else result.format
    return header | {"tags": [*dict.fromkeys((*own, kind, "low-precision"))]}


def _is_foreign(result: ConvertResult) -> bool:
    """Whether the output has a third-party layout."""
    return bool(result.options.get("layout", "lpconv") != "lpconv")


def _is_hub_id(result: ConvertResult) -> bool:
    """Whether the source is from the hub: it has a revision, since a directory may look like a hub id."""
    return result.source.revision is not None and _HUB_ID.fullmatch(result.source.resolved) is not None


def _open_converted(result: ConvertResult) -> tuple[Block, ...]:
    auto = auto_class(result.architecture)
    if _is_foreign(result):
        layout = LAYOUTS[result.options["layout"]]
        words = layout.opening.format(codes=f"{result.format} codes with {scale_words(result)}")
        return Prose(text=words), *opening_blocks(result, "PATH")
    if result.method == "collage":
        ordinary = "is an ordinary {} checkpoint: plain transformers and any other tool can open it."
        kept = "What {} rounded away is stored next to it, under `collage/`. lpconv adds the residual again:"
        whole = Code(language="python", lines=("import lpconv", "", 'model = lpconv.load("PATH")'))
        first = Prose(text=f"This directory {ordinary.format(result.format)}")
        return first, _loading_code(auto, needs_lpconv=False), Prose(text=kept.format(result.format)), whole
    loader = (
        "For code that cannot import lpconv.hf first, the loader module in this directory registers the format: "
        f'`{auto}.from_pretrained("PATH", trust_remote_code=True)`.'
        + (" It needs the package pcodec." if any(t.format == CODED.name for t in result.tensors) else "")
    )
    return _loading_code(auto, needs_lpconv=True), Prose(text=loader), Prose(text=_REFUSED)


def _tensor_section(result: ConvertResult) -> Section | None:
    columns = ("action", "tensors", "format", "before", "after", "why")
    done = Table(columns=columns, rows=tuple(map(action_row, action_groups(result.tensors))))
    worst = dataclasses.replace(
        worst_table(result.tensors, _WORST), caption="The tensors with the lowest signal-to-noise ratio"
    )
    return section("Tensors", done, worst)


def _fidelity(result: ConvertResult) -> str:
    changed = converted_tensors(result.tensors)
    if any(t.sqnr_db is None for t in changed):
        return "as precisely as the stored form allows (not measured)"
    if all(t.sqnr_db == math.inf for t in changed):
        return "exactly, because none of them lost anything"
    return "with the errors given above"


def finetune_card(result: FinetuneResult) -> Document:
    """The card of a fine-tuned model: how to open it, what precision cost, how it was trained."""
    result = _without_folders(result)
    is_adapter = result.saved_as.startswith("adapter")
    header: dict[str, object] = {"library_name": "peft" if is_adapter else "transformers", **result.card}
    if "base_model" in result.card:
        header["base_model_relation"] = "adapter" if is_adapter else "finetune"
    header["tags"] = ["lpconv", "fine-tuned", *result.recipe.split(), "low-precision"]
    return Document(
        kind="card",
        title=title(result),
        summary=verdict(result),
        sections=sections_of(
            _open_tuned(result),
            section("What precision cost", gap_table(result)),
            section("Before and after", held_out_table(result), held_out_words(result)),
            section("During training", diagnostics(result)),
        ),
        warnings=result.warnings,
        facts=result.facts,
        front_matter=header,
    )


def _without_folders(result: FinetuneResult) -> FinetuneResult:
    """A copy without local folders: a local model is named by its last path component."""
    facts = {k: PurePath(v).name if PurePath(v).is_absolute() else v for k, v in result.facts.items()}
    name = result.name if result.card.get("base_model") == result.name else PurePath(result.name).name
    return dataclasses.replace(result, name=name, facts=facts)


def _open_tuned(result: FinetuneResult) -> Section | None:
    if result.saved_as.startswith("adapter"):
        opening = f'model = PeftModel.from_pretrained(lpconv.load("{result.name}"), "PATH")'
        lines = ("import lpconv", "from peft import PeftModel", "", opening)
        return section("How to open it", Code(language="python", lines=lines))
    is_plain, is_pair = result.saved_as.startswith("plain"), result.saved_as.startswith("collage")
    blocks: list[Block] = [_loading_code(_AUTO_BY_TASK[result.task], needs_lpconv=not (is_plain or is_pair))]
    if is_pair:
        blocks.append(
            Prose(text='`lpconv.load("PATH")` adds what bf16 rounded away, which is stored under `collage/`.')
        )
    return section("How to open it", *tuple(blocks))


def _loading_code(auto: str, *, needs_lpconv: bool) -> Code:
    """The code that opens a checkpoint with an auto class of transformers."""
    registers = ("import lpconv.hf  # registers the format with transformers",) if needs_lpconv else ()
    lines = (*registers, f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("PATH")')
    return Code(language="python", lines=lines)
