"""A document as a model card."""

import re

import yaml

from lpconv.report.document import Code, Document, Prose, Section, Table
from lpconv.report.markdown import markdown


def card(name: str) -> str:
    table = Table(columns=("Tensor", "<Why"), rows=((name, name),), has_names=True)
    blocks = (name, table, (name,), Code(lines=("import x", name), language="python"))
    return markdown(
        Document(
            kind="card",
            title=name,
            summary=name,
            sections=(Section(title="All", blocks=(*blocks, {name: name}, Prose(text="`kept` as-is"))),),
            warnings=(name,),
            command=name,
            front_matter={"license": name},
        )
    )


def test_every_block_has_its_place() -> None:
    text = card("a")
    assert yaml.safe_load(text.split("---\n")[1]) == {"license": "a"}
    for part in ("# a\n\na\n", "| `a` | a |", "\n- a\n", "```python\nimport x\na\n```", "`kept` as-is", "## Warnings"):
        assert part in text
    assert text.endswith("```\na\n```\n")


def test_a_hostile_name_stays_text() -> None:
    text = card("`|<script>alert(1)</script>|[x](javascript:y)\n# head")
    outside_code = re.sub(r"(`+).*?\1", "", text.partition("---\n\n")[2].replace("\\`", ""), flags=re.DOTALL)
    assert "<script>" not in outside_code
    assert "\n# head" not in text
    assert "](javascript" not in outside_code.replace("\\]", "")
    for line in (line for line in text.splitlines() if line.startswith("| ") and "script" in line):
        assert len(re.findall(r"(?<!\\)\|", line)) == 3, "a bar in a name adds no cell"
