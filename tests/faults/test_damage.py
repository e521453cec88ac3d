"""Every planted damage is detected by the levels that claim to; docs/verify.md has the numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lpconv.forms import FORMS
from lpconv.layouts import LAYOUTS
from tests.faults.damage import FORMS_TRIED, Pair, Seen, make_outputs
from tests.faults.damage_page import in_layouts, in_outputs, matrix, paragraphs
from tests.faults.differences import make_layouts

Found = tuple[dict[str, Pair], dict[str, list[Seen]]]


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Seen]]]:
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield in_layouts(make_layouts(folder))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    outputs = make_outputs(tmp_path_factory.mktemp("damage"))
    return outputs, matrix(outputs)


def test_every_form_is_tried() -> None:
    # Not for models like the demo's: see tests/convert/test_gguf_layout.py and test_experts.py.
    written = {x.form.kind for x in LAYOUTS.values() if x.form is not None and x.name not in ("gguf", "mxfp4")}
    assert {form.split(" (")[0] for form in FORMS_TRIED} | {"kept"} == {*FORMS, *written, "compressed"}


def test_nothing_is_silent(found: Found) -> None:
    seen = [(form, s) for form, all_seen in found[1].items() for s in all_seen]
    silent = [(form, s.damage.component, s.damage.kind) for form, s in seen if not (s.hashes and s.weights)]
    assert not silent
    assert len(seen) >= 500


def test_no_difference_from_the_source_is_silent(different: dict[str, list[Seen]]) -> None:
    seen = [(layout, s) for layout, all_seen in different.items() for s in all_seen]
    assert [(layout, s.damage.component, s.damage.kind) for layout, s in seen if not (s.hashes and s.weights)] == []
    assert len({(s.damage.component, s.damage.kind) for _, s in seen}) >= 60


def test_the_page_is_current(found: Found, different: dict[str, list[Seen]]) -> None:
    outputs, seen = found
    ran = {form: in_outputs(form, pair) for form, pair in outputs.items()}
    assert all(noticed for pairs in ran.values() for _, noticed in pairs)
    text = Path(__file__).parents[2].joinpath("docs/verify.md").read_text(encoding="utf-8")
    for paragraph in paragraphs(seen, ran, different):
        assert f"\n{paragraph}\n" in text, "run `python -m tests.faults.damage_page`"
