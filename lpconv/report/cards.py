"""Model cards described: how to open what was written, what was measured, how it was made."""

import dataclasses
from pathlib import PurePath

from lpconv.report.document import Block, Bullets, Code, Document, Prose, Section, sections_of
from lpconv.report.finetune_words import diagnostics, gap_table, held_out_table, held_out_words, title, verdict
from lpconv.results import FinetuneResult

_AUTO_BY_TASK = {
    "mlm": "AutoModelForMaskedLM",
    "clm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def finetune_card(result: FinetuneResult) -> Document:
    """The card of a fine-tuned model: how to open it, what precision cost, how it was trained."""
    result = _public(result)
    header: dict[str, object] = {"library_name": "transformers", **result.card}
    if "base_model" in result.card:
        header["base_model_relation"] = "finetune"
    header["tags"] = ["lpconv", "fine-tuned", *result.recipe.split(), "low-precision"]
    return Document(
        kind="card",
        title=title(result),
        summary=verdict(result),
        sections=sections_of(
            _open_tuned(result),
            Section(title="What precision cost", blocks=(gap_table(result),)),
            Section(title="Before and after", blocks=(held_out_table(result), held_out_words(result))),
            Section(title="On the way", blocks=(Bullets(lines=diagnostics(result)),)),
        ),
        warnings=result.warnings,
        facts=result.facts,
        front_matter=header,
    )


def _public(result: FinetuneResult) -> FinetuneResult:
    """Without the folders of this machine: a local model goes by its name."""
    facts = {k: PurePath(v).name if PurePath(v).is_absolute() else v for k, v in result.facts.items()}
    name = result.name if result.card.get("base_model") == result.name else PurePath(result.name).name
    return dataclasses.replace(result, name=name, facts=facts)


def _open_tuned(result: FinetuneResult) -> Section:
    is_plain, is_pair = result.saved_as.startswith("plain"), result.saved_as.startswith("collage")
    blocks: list[Block] = [_loading(_AUTO_BY_TASK[result.task], needs_lpconv=not (is_plain or is_pair))]
    if is_pair:
        blocks.append(Prose(text='`lpconv.load("PATH")` adds what bf16 rounded away, which lies under `collage/`.'))
    return Section(title="How to open it", blocks=tuple(blocks))


def _loading(auto: str, *, needs_lpconv: bool) -> Code:
    """The program that opens a checkpoint with an auto class of transformers."""
    registers = ("import lpconv.hf  # registers the format with transformers",) if needs_lpconv else ()
    lines = (*registers, f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("PATH")')
    return Code(language="python", lines=lines)
