"""What is repeated of a source's model card, whatever stands in it."""

from pathlib import Path

import pytest

from lpconv.data import demo_checkpoint
from lpconv.plan.provenance import inherited_facts


def test_the_demo_has_a_licence() -> None:
    assert inherited_facts(demo_checkpoint(), None) == {"license": "apache-2.0"}


def test_a_model_of_the_hub_is_its_own_base(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\ntags: [x]\n---\n# It\n")
    assert inherited_facts(tmp_path, None) == {"license": "mit", "base_model": "a/b"}
    assert inherited_facts(tmp_path, "c/d") == {"license": "mit", "base_model": "c/d"}


@pytest.mark.parametrize(
    "card",
    [None, b"", b"# No front matter\n---\nlicense: mit\n---\n", b"---\n: [\n---\n", b"---\n- a\n---\n", b"\xff\xfe\x00",
     b"---\nlicense: [mit, x]\n---\n", b"---\nlicense: !!python/object/apply:os.getcwd []\n---\n",
     b"---\nlicense: null\n---\n", b"---\n" + b"[" * 9000 + b"\n---\n", b'---\nlicense: "\\UFFFFFFFF"\n---\n',
     b"---\n%YAML 1." + b"9" * 5000 + b"\n---\n"],
)  # fmt: skip
def test_any_other_card_says_nothing(card: bytes | None, tmp_path: Path) -> None:
    if card is not None:
        (tmp_path / "README.md").write_bytes(card)
    assert inherited_facts(tmp_path, None) == {}


_DOUBLED = "\n".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}" for i in range(64))  # 2^64 keys if merged


@pytest.mark.parametrize(
    "line",
    ["date: 2023-02-30", f"size: {'9' * 5000}", "a: !!bool maybe", "a: !!int ''", "a: !!timestamp x", "a: !!float x",
     f"a0: &a0 {{x: 1}}\n{_DOUBLED}"],
)  # fmt: skip
def test_odd_values_next_to_the_licence(tmp_path: Path, line: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{line}\nlicense: mit\n---\n")
    assert inherited_facts(tmp_path, None) == {"license": "mit"}


def test_a_licence_of_characters_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text('---\nlicense: "\\uD800"\n---\n')
    assert inherited_facts(tmp_path, None) == {"license": "\\ud800"}
