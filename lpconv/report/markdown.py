"""Render a document as a model card: Markdown with a YAML header.

All text is escaped, because names come from untrusted files. Equal documents give equal bytes: no time or path is
added.
"""

import re
from collections.abc import Mapping, Sequence

import yaml

from lpconv.report.document import Block, Checks, Code, Document, Prose, Section, Table, texts_of
from lpconv.report.printable import printable_record

# An underscore inside a word is not markup.
_SPECIAL = re.compile(r"([\\`*\[\]#|~$]|(?<!\w)_|_(?!\w))")


def markdown(document: Document) -> str:
    """Render a document as a model card that ends in one newline."""
    shown = printable_record(document)
    header = yaml.safe_dump(dict(shown.front_matter), sort_keys=False, width=10_000).strip()
    provenance = {**shown.facts, **dict(sorted(shown.versions.items()))}
    blocks: list[Block] = [provenance] if provenance else []
    blocks += [Code(lines=(shown.command,))] if shown.command else []
    sections = [
        *shown.sections,
        Section(title="Warnings", blocks=(shown.warnings,) if shown.warnings else ()),
        Section(title="How it was made", blocks=tuple(blocks)),
    ]
    parts = [f"---\n{header}\n---", f"# {_escape(shown.title)}", _escape(shown.summary)]
    parts += [part for section in sections for part in _section(section)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [text for block in section.blocks if (text := _block(block))]
    return [f"## {_escape(section.title)}", *blocks] if blocks else []


def _block(block: Block) -> str:
    """A block as Markdown; empty for charts, which a card does not show."""
    if isinstance(block, str):
        return _escape(block)
    if isinstance(block, Prose):
        return block.text
    if isinstance(block, tuple):
        return "\n".join(f"- {_escape(line)}" for line in block)
    if isinstance(block, Checks):
        return "\n".join(f"- {_escape(c.name)}: {c.outcome}; {_escape(c.text)}" for c in block.checks)
    if isinstance(block, Mapping):
        return _table(("what", "which"), [(_escape(label), _escape(text)) for label, text in block.items()])
    if isinstance(block, Table):
        first = code_span if block.has_names else _escape
        rows = [(first(name), *map(_escape, rest)) for name, *rest in texts_of(block)]
        caption = f"{_escape(block.caption)}:\n\n" if block.caption else ""
        return caption + _table([_escape(c.removeprefix("<")) for c in block.columns], rows)
    if isinstance(block, Code):
        text = "\n".join(block.lines)
        fence = _fence_for(text)
        return f"{fence}{block.language}\n{text}\n{fence}"
    return ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the cells must be escaped already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(text: str) -> str:
    """Escape text so that Markdown and HTML show it literally."""
    return _SPECIAL.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")


def code_span(text: str) -> str:
    """A Markdown code span that is also safe in tables, where even code spans may not contain a bare pipe."""
    ticks = _fence_for(text, least=1)
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|")


def _fence_for(text: str, least: int = 3) -> str:
    """A fence with more backticks than any run of them in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)
