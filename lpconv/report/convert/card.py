"""The model card (README.md) of an output: what it is, how to open it, what was measured, how to go back.

Every figure comes from the record. Names are escaped, since they come from files that anybody may have made.
"""

import math
import re

import yaml

from lpconv.report.convert.compare import RUN_FIGURES, figures
from lpconv.report.convert.words import done_row, method_name, scale_words, summary, worst_row
from lpconv.report.numbers import MISSING
from lpconv.report.printable import code_span, escaped, fence_for, printable_record, table
from lpconv.report.tensors import converted, done_groups, worst_tensors
from lpconv.report.verify import checks, outcome_of
from lpconv.results import ConvertResult

_TAGS = {"unit": "unit-scaling", "scalify": "scalify", "collage": "collage"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Ends of the class names in config.json's `architectures`, and the auto class that builds them.
_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
# How other layouts than ours are opened, by their names.
_LAYOUTS = {
    "compressed-tensors": "This directory has the layout of the compressed-tensors package: {codes}.\n"
    "vLLM reads it, too. On a CPU it serves FP8 with a scale per row (FP8_DYNAMIC) and int4 in groups (W4A16), and\n"
    "has no kernel for weight-only FP8 with one scale per tensor, int8 in groups, MXFP8, MXFP4 and NVFP4.\n\n"
    "transformers opens it with `pip install compressed-tensors`, and needs no lpconv:",
    "transformers": "This directory has transformers' own layout: {codes}.\n"
    "transformers opens it with `pip install accelerate`, and needs no lpconv; without a GPU that multiplies fp8\n"
    "it decodes the weights:",
}
_WORST = 5


def model_card(result: ConvertResult) -> str:
    """The card as Markdown with a YAML front matter, ending in one newline.

    It has no time, memory or path in it: converting again gives the same bytes.
    """
    result = printable_record(result)
    title = f"{result.source.name}: {method_name(result.method)}, {result.format}"
    sections = (
        _front_matter(result),
        f"# {escaped(title)}\n\n{escaped(summary(result))}",
        _how_to_open(result),
        _measured(result),
        _tensors(result),
        _verification(result),
        _going_back(result),
        _provenance(result),
    )
    return "\n\n".join(sections) + "\n"


def _front_matter(result: ConvertResult) -> str:
    methods = [_TAGS.get(part, part) for part in result.method.split("+")]
    facts: dict[str, object] = {"library_name": "lpconv"}
    if _is_hub_id(result):
        facts["base_model"] = result.source.resolved
    facts |= result.card
    if "base_model" in facts:
        facts["base_model_relation"] = "quantized"
    facts["tags"] = ["lpconv", *methods, result.format, "low-precision"]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, width=10_000).strip()}\n---"


def _is_hub_id(result: ConvertResult) -> bool:
    """A directory may look like a hub id; a record of a hub download carries a revision."""
    return result.source.revision is not None and _HUB_ID.fullmatch(result.source.resolved) is not None


def _how_to_open(result: ConvertResult) -> str:
    layout = result.options.get("layout")
    if layout in _LAYOUTS:
        return _open_plainly(result, _LAYOUTS[layout].format(codes=f"{result.format} codes with {scale_words(result)}"))
    return _open_collage(result) if result.method == "collage" else _open_codes(result)


def _open_codes(result: ConvertResult) -> str:
    auto = _auto_class(result)
    return f"""## How to open it

```python
import lpconv.hf  # registers the format with transformers
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```

The loader module in this directory registers it too, for code that cannot import lpconv.hf first:
`{auto}.from_pretrained("PATH", trust_remote_code=True)`.

Plain transformers refuses these weights on purpose. The codes mean nothing without their scales, so they are stored
with one more axis than the model's weights have, and loading them without lpconv stops with a size mismatch."""


def _open_plainly(result: ConvertResult, words: str) -> str:
    auto = _auto_class(result)
    return f"""## How to open it

{words}

```python
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```"""


def _open_collage(result: ConvertResult) -> str:
    auto = _auto_class(result)
    return f"""## How to open it

This directory is an ordinary {result.format} checkpoint: plain transformers and any other tool can open it.

```python
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```

What {result.format} rounded away is kept beside it, under `collage/`. With lpconv the residual comes back:

```python
import lpconv

model = lpconv.load("PATH")
```"""


def _auto_class(result: ConvertResult) -> str:
    name = result.architecture or ""
    return next((auto for end, auto in _AUTO_CLASSES.items() if name.endswith(end)), "AutoModel")


def _measured(result: ConvertResult) -> str:
    rows = [(f.label, escaped(f.values[0])) for f in figures([result]) if f.label not in RUN_FIGURES]
    return f"## What was measured\n\n{table(('figure', 'value'), rows)}"


def _tensors(result: ConvertResult) -> str:
    groups = [tuple(map(escaped, done_row(g))) for g in done_groups(result.tensors)]
    text = f"## Tensors\n\n{table(('action', 'tensors', 'format', 'before', 'after', 'why'), groups)}"
    worst = [(code_span(t.name), *map(escaped, worst_row(t)[1:])) for t in worst_tensors(result.tensors, _WORST)]
    if not worst:
        return text
    head = ("tensor", "format", "SQNR, dB", "max rel. error", "scale", "besides rounding")
    return f"{text}\n\nThe tensors with the lowest signal-to-noise ratio:\n\n{table(head, worst)}"


def _verification(result: ConvertResult) -> str:
    v = result.verify
    lines = [f"- {escaped(c.name)}: {c.outcome}; {escaped(c.text)}" for c in checks(v)]
    lines += [f"- problem: {escaped(p)}" for p in v.problems]
    level = "" if outcome_of(v) == "not run" else f", level {escaped(v.level)}"
    return "\n".join([f"## Verification: {outcome_of(v)}{level}", *([""] if lines else []), *lines])


def _going_back(result: ConvertResult) -> str:
    return f"""## How to get the original back

```
lpconv restore PATH -o ORIGINAL
```

writes a plain checkpoint again: kept tensors bit for bit, converted ones {_fidelity(result)}."""


def _fidelity(result: ConvertResult) -> str:
    changed = converted(result.tensors)
    if any(t.sqnr_db is None for t in changed):
        return "as near as the stored form holds them (not measured)"
    if all(t.sqnr_db == math.inf for t in changed):
        return "exactly, since none of them lost anything"
    return "with the errors given above"


def _provenance(result: ConvertResult) -> str:
    source = result.source.resolved if _is_hub_id(result) else result.source.name
    facts = [("source", code_span(source)), ("revision", code_span(result.source.revision or MISSING))]
    facts += [(escaped(name), code_span(version)) for name, version in sorted(result.versions.items())]
    text = f"## Provenance\n\n{table(('what', 'which'), facts)}"
    if result.warnings:
        text += "\n\nWarnings:\n\n" + "\n".join(f"- {escaped(w)}" for w in result.warnings)
    if not result.command:
        return text
    fence = fence_for(result.command)
    return f"{text}\n\nMade by ({method_name(result.method)}):\n\n{fence}\n{result.command}\n{fence}"
