"""Tests assert names and numbers, not sentences: the wording of a message is free, what it has to name is not.

A sentence is two plain words in a row: `no column`, but not `--format fp16`, `3 tensors`, a path, a command or anything
in backticks. Looked at is what follows `match=`, and what a test searches for or compares with, also out of a table.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from lpconv.report.document import Outcome

SEARCHES = {"startswith", "endswith", "count", "index", "partition", "split", "search", "match", "findall", "fullmatch"}
NO_PROSE = re.compile(r"`[^`]*`|^`?(lpconv|hf|vllm) .*")
SENTENCE = re.compile(r"(?<![\w'\"/.<>=\[(\\-])[A-Z]?[a-z]+ +[a-z]+(?![\w/={(\[-]|\.\w)")
Names = dict[str, list[ast.expr]]


def parts(node: ast.expr, names: Names) -> list[ast.expr]:
    """The expressions that `node` may stand for or is made of: what a name was bound to, what a table holds."""
    match node:
        case ast.Name(id=name):
            return names[name]
        case ast.Dict(values=found):
            return found
        case ast.Subscript(value=table):
            return [table]
        case ast.Call(func=ast.Attribute(value=table, attr="items")):
            return [ast.Tuple([ast.Constant(0), row]) for row in elements(table, names)]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args, keywords=more):
            return [*args, *(k.value for k in more)] if re.match("param$|escape$|[A-Z](?!.*Error)", name) else []
        case ast.Tuple() | ast.List() | ast.Set() | ast.BinOp() | ast.IfExp() | ast.Starred():
            return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return []


def elements(node: ast.expr, names: Names, depth: int = 6) -> Iterator[ast.expr]:
    """What iterating over `node` gives."""
    for part in parts(node, names) if depth else ():
        yield from elements(part, names, depth - 1) if isinstance(node, ast.Name | ast.BinOp | ast.Starred) else [part]


def strings(node: ast.expr, names: Names, depth: int = 6) -> Iterator[str]:
    """The texts in `node`; "0" stands for what an f-string inserts."""
    if isinstance(node, ast.Constant | ast.JoinedStr):
        yield "".join(p.value if isinstance(p.value, str) else "0" for p in getattr(node, "values", [node]))
    for part in parts(node, names) if depth else ():
        yield from strings(part, names, depth - 1)


def bind(target: ast.expr, rows: Iterable[ast.expr], names: Names) -> None:
    """Note that `target` may stand for each of `rows`, or its elements for theirs."""
    for row in rows:
        if isinstance(target, ast.Name):
            names[target.id].append(row)
        for each, part in zip(getattr(target, "elts", ()), elements(row, names), strict=False):
            bind(each, [part], names)


def sentences(source: str) -> set[str]:
    """Sentences that the tests in `source` assert."""
    names: Names = defaultdict(list)
    asserted: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Assign(targets=[target], value=ast.Subscript(value=rows))
                | ast.For(target=target, iter=rows)
                | ast.comprehension(target=target, iter=rows)
            ):
                bind(target, elements(rows, names), names)
            case ast.Assign(targets=[target], value=row):
                bind(target, [row], names)
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[keys, rows, *_]):
                columns = ast.parse(re.sub(r"[()'\"]", "", ast.unparse(keys)), mode="eval").body
                bind(columns, elements(rows, names), names)
            case ast.Call(func=ast.Attribute(attr=name), args=[text, *_]) if name in SEARCHES:
                asserted.append(text)
            case ast.keyword(arg="match", value=text):
                asserted.append(text)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn(), *_], comparators=others):
                asserted += [left, *others]
            case ast.Assert(test=test):
                equal = [c for c in ast.walk(test) if isinstance(c, ast.Compare) and isinstance(c.ops[0], ast.Eq)]
                asserted += [side for c in equal for side in (c.left, *c.comparators)]
    found = {text for value in asserted for text in strings(value, names)} - {*get_args(Outcome)}
    return {text for text in found if SENTENCE.search(NO_PROSE.sub("0", text))}


def test_tests_assert_no_sentence() -> None:
    paths = [p for p in Path(__file__).parent.rglob("*.py") if not p.stem.endswith(("_page", "_wording"))]
    found = {p.name: said for p in paths if (said := sentences(p.read_text(encoding="utf-8")))}
    assert not found, "assert what the message has to name: an option, a tensor, a number, a path, or one word of it"


@pytest.mark.parametrize(
    "source",
    [
        "raises(E, match=TEXT)",
        "assert TEXT in message",
        "assert error.hint == TEXT",
        "assert x == Record(notes=[TEXT])",
        "assert message.startswith(TEXT)",
        "assert all(words in message for words in ('a', TEXT))",
        "@mark.parametrize(('a', 'said'), [(1, 'x'), param(2, TEXT)])\ndef test(a, said): assert said in message",
        "CASES = {'a': (1, TEXT)}\ncode, said = CASES[x]\nassert said in message",
        "for a, said in {'x': TEXT}.items(): assert said in message",
    ],
)
def test_a_sentence_is_seen(source: str) -> None:
    assert sentences(source.replace("TEXT", '"no file `a`"')) == {"no file `a`"}
    assert not sentences(source.replace("TEXT", '"file `no such a` of --no-file in /no/such: 3 files"'))
