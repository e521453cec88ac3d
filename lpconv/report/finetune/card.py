"""The model card (README.md) of a fine-tuned model: how to open it, what precision cost, how it was trained."""

import dataclasses
from pathlib import PurePath

import yaml

from lpconv.report.finetune.words import (
    HELD_OUT_COLUMNS,
    diagnostics,
    gap_rows,
    held_out_rows,
    held_out_words,
    title,
    verdict,
)
from lpconv.report.printable import escaped, printable_record, table
from lpconv.results import FinetuneResult

_AUTO = {
    "mlm": "AutoModelForMaskedLM",
    "clm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def finetune_card(result: FinetuneResult) -> str:
    """The card as Markdown with a YAML front matter, ending in one newline."""
    result = _public(printable_record(result))
    sections = (
        _front_matter(result),
        f"# {escaped(title(result))}\n\n{escaped(verdict(result))}",
        _how_to_open(result),
        _gaps(result),
        _held_out(result),
        "## On the way\n\n" + "\n".join(f"- {escaped(line)}" for line in diagnostics(result)),
        "## How it was run\n\n" + table(("what", "how"), [(escaped(k), escaped(v)) for k, v in result.facts.items()]),
        _warnings(result),
    )
    return "\n\n".join(s for s in sections if s) + "\n"


def _public(result: FinetuneResult) -> FinetuneResult:
    """Without the folders of this machine: a local model goes by its name."""
    facts = {k: PurePath(v).name if PurePath(v).is_absolute() else v for k, v in result.facts.items()}
    name = result.name if result.card.get("base_model") == result.name else PurePath(result.name).name
    return dataclasses.replace(result, name=name, facts=facts)


def _front_matter(result: FinetuneResult) -> str:
    facts: dict[str, object] = {"library_name": "transformers", **result.card}
    if "base_model" in result.card:
        facts["base_model_relation"] = "finetune"
    facts["tags"] = ["lpconv", "fine-tuned", *result.recipe.split(), "low-precision"]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, width=10_000).strip()}\n---"


def _how_to_open(result: FinetuneResult) -> str:
    auto = _AUTO[result.task]
    needs = not result.saved_as.startswith(("plain", "collage"))
    before = "import lpconv.hf  # registers the format with transformers\n" if needs else ""
    text = (
        f"## How to open it\n\n```python\n{before}from transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("PATH")\n```'
    )
    if result.saved_as.startswith("collage"):
        text += '\n\n`lpconv.load("PATH")` adds what bf16 rounded away, which lies under `collage/`.'
    return text


def _gaps(result: FinetuneResult) -> str:
    if not result.gaps:
        return ""
    rows = [tuple(map(escaped, row)) for row in gap_rows(result)]
    run, twin = escaped(result.recipe), escaped(result.twin or "")
    head = ("metric", run, twin, "gap, 95 % interval", "standard error", "beyond noise?")
    return f"## What precision cost\n\n{table(head, rows)}"


def _held_out(result: FinetuneResult) -> str:
    if not result.held_out:
        return ""
    rows = [tuple(map(escaped, row)) for row in held_out_rows(result)]
    head = tuple(c.removeprefix("<").lower() for c in HELD_OUT_COLUMNS)
    return f"## Before and after\n\n{escaped(held_out_words(result))}\n\n{table(head, rows)}"


def _warnings(result: FinetuneResult) -> str:
    return "## Warnings\n\n" + "\n".join(f"- {escaped(w)}" for w in result.warnings) if result.warnings else ""
