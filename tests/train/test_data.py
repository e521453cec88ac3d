"""Rows, windows, masks and the order of a run's examples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lpconv.data import demo_checkpoint
from lpconv.data.texts import QUICK_BYTES, quick_rows
from lpconv.errors import InputError, LpconvError, UsageError
from lpconv.train.data import check_data, read_rows
from lpconv.train.examples import Stream, classification, collate, pack_examples
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic

TEXTS = [{"text": f"row {i} of a small table", "label": "even" if i % 2 == 0 else "odd"} for i in range(40)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_checkpoint())


def options(path: Path | str, **more: Any) -> FinetuneOptions:
    return FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), data=str(path), **more)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_tables_read_alike(ending: str, tmp_path: Path) -> None:
    import datasets

    path, table = tmp_path / f"rows.{ending}", datasets.Dataset.from_list(TEXTS)
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[ending](path)
    rows = read_rows(options(path))
    assert (rows.text, rows.label) == ("text", "label")
    assert rows.held_out is not None
    assert sorted([*rows.texts(rows.train), *rows.texts(rows.held_out)]) == sorted(r["text"] for r in TEXTS)


def test_held_out_rows_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    parts = [read_rows(options(path, seed=seed)).held_out["text"] for seed in (0, 1)]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("broken.jsonl", b'{"text": "a"\n{{{'),
        ("binary.txt", b"\xff\xfe\x00"),
        ("numbers.jsonl", b'{"text": 1}\n{"text": 2}\n'),
        ("blank.jsonl", b'{"text": ""}\n{"text": "  "}\n'),
        ("latin.jsonl", '{"text": "r\u00f6w"}\n'.encode("latin-1")),
    ],
)
def test_bad_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_rows(options(tmp_path / name))
    assert caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("quick_bytes", [QUICK_BYTES, 0])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", '{"text":\n"x"}{"text": "y"}\n\n'), ("jsonl", '[{"text": "x"},\n{"text": "y"}]'),
        ("jsonl", '\ufeff{"text": "x", "n": NaN}\n'), ("json", '[{"n": 1, "text": "x"}, {"n": 2, "text": "y"}]'),
        ("csv", "\ntext,n\nx,1\ny,2\n"),
    ],
)  # fmt: skip
def test_rows_that_datasets_reads_pass_the_check(
    kind: str, text: str, quick_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpconv.data.texts.QUICK_BYTES", quick_bytes)
    path = tmp_path / f"rows.{kind}"
    path.write_text(text)
    check_data(options(path, text_column="text"))
    assert not quick_bytes or [*quick_rows(path)[1]] == read_rows(options(path)).train.column_names


def test_a_data_set_of_the_hub_offline_is_refused() -> None:
    with pytest.raises(InputError, match="`nobody/no-such-data`") as caught:
        read_rows(options("nobody/no-such-data"))
    assert "cache" in (caught.value.hint or "")


def test_a_data_set_in_the_cache_is_left_to_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "nobody___no_such_data").mkdir()
    check_data(options("nobody/No-Such-Data"))
    for name in ("nobody/data", "nobody/no-such"):
        with pytest.raises(InputError, match=rf"`{name}`.* HF_HUB_OFFLINE"):
            check_data(options(name))


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    with pytest.raises(UsageError, match="`labels2`") as caught:
        read_rows(options(path, label_column="labels2"))
    assert "label" in (caught.value.hint or "")


def test_packing_loses_only_the_end_and_separates_texts(tmp_path: Path, tokenizer: Any) -> None:
    rows = read_rows(options(write_jsonl(tmp_path / "rows.jsonl", TEXTS)))
    found = pack_examples(rows, tokenizer, seq_len=16, vocab_size=272, prefix=[], suffix=[])
    ids = np.concatenate([x["input_ids"] for x in found.train])
    end = tokenizer.eos_token_id
    expected = [i for text in rows.texts(rows.train) for i in [*tokenizer(text)["input_ids"], end]]
    assert len(expected) - len(ids) < 16
    assert ids.tolist() == expected[: len(ids)]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    rows = read_rows(options(write_jsonl(tmp_path / "rows.jsonl", TEXTS)))
    with pytest.raises(InputError, match=" 50"):
        pack_examples(rows, tokenizer, seq_len=16, vocab_size=50, prefix=[], suffix=[])
    with pytest.raises(InputError, match=" 50"):
        classification(rows, tokenizer, seq_len=12, vocab_size=50)


@pytest.mark.parametrize(
    ("labels", "num_trained", "message"),
    [
        ([0, 1, -1, 1], 0, " -1"),
        ([0, 1, 2, 7], 3, " 3 classes"),
        ([0.5, 1.5, 0.5, 1.5], 0, "names .*numbers"),
        (["a", "a", "a", "a"], 0, "class"),
        ([0, None, 1, 1], 0, "'x 1'"),
        ([[0], [1], [0], [1]], 0, "names .*numbers"),
    ],
)
def test_labels_that_cannot_be_are_refused(
    labels: list[Any], num_trained: int, message: str, tmp_path: Path, tokenizer: Any
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"text": f"x {i}", "label": y} for i, y in enumerate(labels)])
    held = write_jsonl(tmp_path / "held.jsonl", [{"text": "x", "label": labels[0]}] * 2)
    rows = read_rows(options(train, eval_data=str(held)))
    with pytest.raises(LpconvError, match=message):
        classification(rows, tokenizer, seq_len=16, vocab_size=10**6, head=["?"] * num_trained)


def test_labels_may_be_booleans(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": i % 2 == 1} for i in range(20)])
    found = classification(read_rows(options(train)), tokenizer, seq_len=16, vocab_size=10**6)
    assert {x["labels"] for x in found.train} == {0, 1}


def test_one_empty_cell_does_not_turn_numbers_of_a_csv_into_something_else(tmp_path: Path, tokenizer: Any) -> None:
    rows = "".join(f"text {i},{i % 2}\n" for i in range(20))
    train, held = tmp_path / "train.csv", tmp_path / "held.csv"
    train.write_text("text,label\n" + rows)
    held.write_text("text,label\n" + rows + "text 20,\n")
    with pytest.raises(InputError, match="'text 20'"):
        classification(read_rows(options(train, eval_data=str(held))), tokenizer, seq_len=16, vocab_size=10**6)


def test_rows_without_text_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    lines = [*TEXTS, {"text": None, "label": "odd"}, {"text": "", "label": "odd"}, {"label": "odd"}]
    rows = read_rows(options(write_jsonl(tmp_path / "rows.jsonl", lines)))
    (note,) = pack_examples(rows, tokenizer, seq_len=16, vocab_size=272, prefix=[], suffix=[]).notes
    assert "3 of 43 rows" in note


def test_long_texts_are_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = read_rows(options(write_jsonl(tmp_path / "rows.jsonl", TEXTS)))
    found = classification(rows, tokenizer, seq_len=12, vocab_size=10**6)
    assert max(len(x["input_ids"]) for x in found.train) == 12
    (note,) = found.notes
    assert "40 of 40" in note
    assert "12 tokens" in note
    assert found.labels == ("even", "odd")


def test_the_order_is_a_function_of_the_seed_and_shows_every_example_each_round() -> None:
    examples = [{"input_ids": np.array([i]), "labels": 0} for i in range(7)]
    first, again, other = (Stream(examples, 20, seed=s) for s in (1, 1, 2))
    assert first.order.tolist() == again.order.tolist() != other.order.tolist()
    assert sorted(first.order[:7]) == sorted(first.order[7:14]) == list(range(7))


def test_masks_depend_on_the_place_and_never_cover_special_tokens() -> None:
    examples = [{"input_ids": np.arange(100, 140)}]
    stream = Stream(examples, 50, seed=0, mask=5, keep=(2, 3))
    shown = [stream[i] for i in range(50)]
    for x in shown:
        masked = x["labels"] != -100
        assert masked.sum() == round(0.15 * 35)
        assert not masked[:2].any()
        assert not masked[-3:].any()
        assert (x["input_ids"][masked] == 5).all()
        assert (np.where(masked, x["labels"], x["input_ids"]) == np.arange(100, 140)).all()
    assert len({tuple(x["input_ids"]) for x in shown}) > 40
    assert (stream[7]["input_ids"] == shown[7]["input_ids"]).all()


def test_padding_is_masked_out_and_ignored_by_the_loss() -> None:
    batch = collate(
        [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}], pad_id=9, seq_len=128
    )
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [3, 1]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 9).all()
    whole = collate(
        [{"input_ids": [1, 2, 3], "labels": 1}, {"input_ids": [4, 5, 6], "labels": 0}], pad_id=9, seq_len=128
    )
    assert torch.equal(whole["labels"], torch.tensor([1, 0]))
    assert "attention_mask" not in whole
    short = collate([{"input_ids": [1] * 20, "labels": 1}, {"input_ids": [4], "labels": 0}], pad_id=9, seq_len=20)
    assert short["input_ids"].shape == (2, 20)  # a model may have no more positions
