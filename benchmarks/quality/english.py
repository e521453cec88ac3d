"""Draw docstrings, comments, docs sentences, error messages and help texts at random, with their older wording:

    python -m benchmarks.quality.english --seed 1 --tree HEAD --before a09e4ed drawn.json

Docstrings and comments come from lpconv/, tests/ and benchmarks/, error messages from lpconv/.

A reader adds "grade_before", "grade" (natural, awkward or riddle) and a "reason" to each entry of the file. The command
prints a page with all texts and the number of natural ones; it draws only if there is no such file.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from benchmarks import common

COUNTS = {"docstring": 100, "comment": 60, "sentence": 60, "error": 40, "help": 40}
Docstringed = ast.ClassDef | ast.FunctionDef


def _definitions(node: ast.AST, name: str = "") -> Iterator[tuple[str, Docstringed | ast.Module]]:
    """A module and all its classes and functions, with qualified names."""
    if isinstance(node, Docstringed | ast.Module):
        yield name, node
    for child in ast.iter_child_nodes(node):
        yield from _definitions(child, f"{name}.{child.name}".lstrip(".") if isinstance(child, Docstringed) else name)


def _string(node: ast.AST) -> str:
    """A string expression as text; expressions of f-strings stay in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else ast.unparse(v) for v in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "{" + ast.unparse(node) + "}"


def code_texts(path: str, source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, text) of the docstrings (first paragraph) and error messages (with hint) of a Python file."""
    for name, node in _definitions(ast.parse(source)):
        if docstring := ast.get_docstring(node):
            yield "docstring", f"{path}:{name}", " ".join(docstring.split("\n\n")[0].split())
        for number, call in enumerate(n for n in ast.walk(node) if isinstance(n, ast.Call) and n.args):
            error = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if error.endswith(("Error", "BadParameter")) and isinstance(call.args[0], ast.Constant | ast.JoinedStr):
                hints = [f" (hint: {_string(k.value)})" for k in call.keywords if k.arg == "hint"]
                yield "error", f"{path}:{name}:{error} {number}", "".join([_string(call.args[0]), *hints])


def comments(path: str, source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, text) of the comments of a Python file; neighbouring lines are one comment."""
    lines = [t for t in tokenize.generate_tokens(StringIO(source).readline) if t.type == tokenize.COMMENT]
    blocks: list[list[tokenize.TokenInfo]] = []
    for line in (t for t in lines if not t.string.startswith(("# type:", "# noqa", "# fmt:", "#!"))):
        if blocks and blocks[-1][-1].start == (line.start[0] - 1, line.start[1]) and line.line.lstrip()[0] == "#":
            blocks[-1].append(line)
        else:
            blocks.append([line])
    for block in blocks:
        text = " ".join(line.string.lstrip("# ") for line in block)
        if len(text.split()) >= 4:
            yield "comment", f"{path}:{' '.join(text.split()[:7])}", text


def page_texts(path: str, source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, text) of a page's sentences outside code, tables and headings, or of its help texts."""
    for section in source.split("\n## ")[1:] if path.endswith("/options.md") else ():
        command, _, body = section.partition("\n")
        options = re.findall(r"^\| (`-.*?) \| .*? ?\| (.*?) \| .*?\|$", body, re.MULTILINE)
        for option, text in (("", body.strip().split("\n")[0]), *options):
            yield "help", f"page:{command} {option}".strip(), text
    is_prose = not path.endswith(("/options.md", "/api.md"))  # these consist of help texts and docstrings
    prose = re.sub(r"(?ms)^```.*?^```|<!--.*?-->|^[|#].*?$", "", source) if is_prose else ""
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose):
        for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`\[*])", " ".join(block.split())):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 4:
                yield "sentence", f"{path}:{' '.join(sentence.split()[:7])}", sentence


def texts(revision: str) -> dict[str, dict[str, str]]:
    """All texts of a revision, by kind and name."""
    folders = ("lpconv", "tests", "benchmarks", "docs", "README.md")
    packed = subprocess.check_output(["git", "archive", revision, *folders])
    texts_by_kind: dict[str, dict[str, str]] = {kind: {} for kind in COUNTS}
    with tarfile.open(fileobj=BytesIO(packed)) as tar:
        for path in tar.getnames():
            if not path.endswith((".py", ".md")) or (path.endswith(".md") and not path.startswith(("docs", "README"))):
                continue
            source = tar.extractfile(path).read().decode()  # type: ignore[union-attr]  # a file
            for read in (code_texts, comments) if path.endswith(".py") else (page_texts,):
                for kind, name, text in read(path, source):
                    if kind != "error" or path.startswith("lpconv"):
                        texts_by_kind[kind][name] = text
    return texts_by_kind


def earlier(kind: str, name: str, text: str, old: dict[str, str]) -> str | None:
    """The older text of the same function or option, or the most similar sentence or error, or None."""
    same = {t for n, t in old.items() if n.split(":")[1] == name.split(":")[1]}
    if kind in ("docstring", "help"):
        return old.get(name) or (same.pop() if len(same) == 1 and name[-1] != ":" else None)
    bag = set(re.findall(r"\w+", text))
    bags = {t: set(re.findall(r"\w+", t)) for t in same or old.values()}
    likeness, best = max((len(w & bag) / len(w | bag), t) for t, w in bags.items())
    return best if likeness >= 0.3 else None


def draw(seed: int, tree: str, before: str) -> list[dict[str, Any]]:
    """Draw texts of one revision and match them with an older one. Identical texts count once."""
    drawn, old = list[dict[str, Any]](), texts(before)
    for kind, named in texts(tree).items():
        names = sorted({text: name for name, text in named.items()}.values())
        for name in random.Random(seed).sample(names, COUNTS[kind]):
            before_text = earlier(kind, name, now := named[name], old[kind])
            drawn.append({"number": len(drawn), "kind": kind, "name": name, "before": before_text, "now": now})
    return drawn


def page(drawn: list[dict[str, Any]]) -> str:
    """Count the grades of each kind, and list every text with its grades."""
    rows = []
    for kind in COUNTS:
        grades = [[d.get(key) for d in drawn if d["kind"] == kind] for key in ("grade_before", "grade")]
        shares = [f"{g.count('natural')} of {len(g) - g.count(None)}" for g in grades]
        rows.append((kind, *shares, *(str(g.count("riddle")) for g in grades)))
    lines = [common.markdown(("kind", "natural before", "natural now", "riddles before", "riddles now"), rows)]
    for d in drawn:
        graded = [(d.get("grade_before"), d["before"]), (d.get("grade"), d["now"]), (d.get("reason"), "")]
        lines += [f"\n**{d['number']}** `{d['name']}`\n", *(f"- {grade}: {text}" for grade, text in graded if grade)]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in {"--seed": "1", "--tree": "HEAD", "--before": "a09e4ed", "file": None}.items():
        parser.add_argument(option, default=default)
    args = parser.parse_args()
    file = Path(args.file)
    if not file.exists():
        file.write_text(json.dumps(draw(int(args.seed), args.tree, args.before), indent=1, ensure_ascii=False))
    print(page(json.loads(file.read_text())))
