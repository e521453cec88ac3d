"""The tables of docs/export.md are those of the recorded results."""

from benchmarks.common import recorded
from benchmarks.serving.table import PAGE, page


def test_the_page_has_the_tables_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m benchmarks.serving.table --write`"


def test_all_weights_that_decoders_found_were_equal() -> None:
    rows = [r for r in recorded("bits")["rows"] if "refused" not in r]
    assert {r["layout"] for r in rows} == {"compressed-tensors", "mlx", "gguf", "onnx"}
    assert all(0 < r["read"] == r["equal"] <= r["weights"] for r in rows)
