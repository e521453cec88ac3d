"""The tables of calibrated rounding and of four bits in the READMEs of benchmarks/ are those of the recorded runs."""

from benchmarks.common import ROOT, recorded
from benchmarks.quality import calibration_tokens, own_text, peers
from benchmarks.quality.peers import OURS, THEIRS
from benchmarks.reproduce import four_bits, unit_attention


def test_the_pages_have_the_tables_of_the_recorded_runs() -> None:
    recorded_four = recorded("four-bits/results")
    four = four_bits.table([four_bits.Run(**r) for r in recorded_four["runs"]])
    noise = four_bits.noise_table([four_bits.Noise(**n) for n in recorded_four["noise"]])
    attention = unit_attention.table([unit_attention.Run(**r) for r in recorded("unit-attention")["runs"]])
    for folder, table in (
        ("quality", peers.table(recorded("peers"))),
        *(("reproduce", x) for x in (four, noise, attention)),
    ):
        assert table in (ROOT / "benchmarks" / folder / "README.md").read_text(encoding="utf-8")
    gptq = (ROOT / "docs" / "methods" / "gptq.md").read_text(encoding="utf-8")
    assert calibration_tokens.table(recorded("calibration-tokens")["rows"]) in gptq
    assert own_text.table(recorded("own-text")["rows"]) in gptq


def test_rows_of_a_model_and_layout_take_as_many_bytes() -> None:
    """GPTQ's own files have zero points and the group of each column besides: up to 7 % more. AutoRound's have 1 % more
    and the tied head twice.
    """
    heads = {"demo": 257 * 128 * 2, "smollm2": 49_152 * 576 * 2}
    rows = [r for r in recorded("peers")["rows"] if "bytes" in r]
    for row in rows:
        ours = next(r for r in rows if (r["model"], r["layout"], r["rounding"]) == (*_place(row), "nearest"))
        package = row["rounding"].partition(" ")[0].rstrip(",")
        most = {"GPTQModel": 1.07, "AutoRound": 1.02}.get(package, 1.0)
        extra = heads[row["model"]] if package == "AutoRound" else 0
        assert ours["bytes"] <= row["bytes"] - extra <= most * ours["bytes"], row
    assert {r["rounding"] for r in rows} <= {*OURS, *THEIRS}


def _place(row: dict[str, object]) -> tuple[object, object]:
    return row["model"], row["layout"]
