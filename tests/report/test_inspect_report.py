"""A look into a checkpoint as a document: the verdict first, and one screen however much there is."""

from lpconv.report.document import Table, texts_of
from lpconv.report.inspect import inspect_document
from lpconv.results import DtypeRecord, FileRecord, InspectResult, StoredTensor
from tests.helpers.report_examples import blocks_of, section_of, verdict_of


def verdict(found: InspectResult) -> tuple[str, str]:
    made = verdict_of(inspect_document(found))
    return made.outcome, made.text


def test_headers_ties_and_problems_are_shown() -> None:
    found = InspectResult(
        path="out/x",
        method="unit",
        format="fp16",
        dtypes=(DtypeRecord(dtype="F16", num_tensors=38, num_elements=22_000_000, size_bytes=44_000_000),),
        shards=tuple(FileRecord(name=f"model-{i}.safetensors", size_bytes=1000) for i in range(20)),
        ties={"lm_head.weight": "model.embed_tokens.weight"},
        tensors=(StoredTensor(name="a.weight", dtype="F16", shape=(1, 2, 3), file="f", size_bytes=12, scale=0.25),),
        problems=("missing",),
        checked=("headers", "index"),
        not_checked=("values",),
    )
    document = inspect_document(found, every=True)
    assert list(document.facts.values())[:2] == ["headers, index", "values"]
    assert document.facts["Kind"].split()[:3] == ["lpconv,", "method", "unit,"]
    assert section_of(document, "Problems").blocks == (("missing",),)
    assert section_of(document, "Tied").blocks == (("lm_head.weight → model.embed_tokens.weight",),)
    tables = {
        section.title: texts_of(b) for section in document.sections for b in section.blocks if isinstance(b, Table)
    }
    assert tables["Dtypes"] == [["F16", "38", "22,000,000", "44.0 MB"]]
    assert tables["Tensors"] == [["a.weight", "F16", "1 x 2 x 3", "12 B", "2^-2"]], (
        "columns without a value are left out"
    )


def test_the_verdict_names_the_worst_there_is() -> None:
    assert verdict(InspectResult(path="x"))[0] == "passed"
    assert verdict(InspectResult(path="x", warnings=("odd",)))[0] == "not run"
    unread = InspectResult(path="x", not_judged="unread", warnings=("odd",))
    assert verdict(unread)[0] == "not run"
    assert "unread" in verdict(unread)[1]
    assert verdict(InspectResult(path="x", problems=("a", "b"), warnings=("odd",)))[0] == "failed"


def test_little_is_shown_unless_all_is_asked_for() -> None:
    notes = tuple(f"`t{i}` is odd" for i in range(1000))
    tensors = tuple(StoredTensor(name=f"t{i}", dtype="F32", shape=(1,), file="f", size_bytes=4) for i in range(1000))
    found = InspectResult(
        path="x", problems=notes, warnings=notes, tensors=tensors, ties={f"a{i}": f"b{i}" for i in range(1000)}
    )
    brief, whole = inspect_document(found), inspect_document(found, every=True)
    for title in ("Problems", "Warnings", "Tied"):
        (few,), (all_,) = section_of(brief, title).blocks, section_of(whole, title).blocks
        assert isinstance(few, tuple)
        assert isinstance(all_, tuple)
        assert few[-1] == "and 995 more (--all)"
        assert (len(few), len(all_)) == (6, 1000)
    assert "1,000" in str(section_of(brief, "Tensors").blocks)
    assert len(next(blocks_of(whole, Table)).rows) == 1000
