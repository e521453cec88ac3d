"""Values, dtypes, shapes and names that a checkpoint may have: counted, kept, reported, given back."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lpconv.convert.restore import restore
from lpconv.plan.options import FormatRule
from lpconv.progress import Silent
from lpconv.verify.reader import OutputReader, read_output
from tests.helpers.checkpoints import Run, bits_of, refusal, write_checkpoint

NAN, INF = float("nan"), float("inf")


class TestValues:
    """Weights that no training run should have left behind: counted, kept, reported."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        weight = torch.linspace(-1, 1, 48).view(6, 8)
        weight[0, :4] = torch.tensor([NAN, INF, -INF, -NAN])
        return write_checkpoint(tmp_path / "source", {"w": weight, "good": torch.linspace(0, 1, 16).view(4, 4)})

    @pytest.mark.parametrize(
        ("method", "format"),
        [("unit", "fp32"), ("unit", "fp16"), ("unit", "bf16"), ("unit", "e5m2"), ("scalify", "fp16"),
         ("collage", "bf16"), ("collage", "fp16")],
    )  # fmt: skip
    def test_nan_and_inf_are_counted_kept_and_reported(
        self, run: Run, source: Path, output: Path, method: str, format: str
    ) -> None:
        result = run(method=method, format=format)
        records = {t.name: t for t in result.tensors}
        assert (records["w"].num_nan, records["w"].num_inf) == (2, 2)
        assert (records["good"].num_nan, records["good"].num_inf) == (0, 0)
        assert any("`w` has 2 NaN and 2 Inf" in w and "kept" in w for w in result.warnings)
        with OutputReader.of(read_output(output)) as reader:
            kept = reader.values("w", 0, 4)
        assert kept.isnan().tolist() == [True, False, False, True]
        assert kept[1:3].tolist() == [INF, -INF]

    def test_inf_becomes_nan_where_the_format_has_no_inf(self, run: Run, output: Path) -> None:
        result = run(format="e4m3fn")
        assert any("`w` has 2 NaN and 2 Inf" in w and "kept" not in w for w in result.warnings)
        with OutputReader.of(read_output(output)) as reader:
            assert reader.values("w", 0, 4).isnan().all()

    def test_what_is_not_finite_does_not_count_in_the_figures(self, run: Run, source: Path) -> None:
        record = next(t for t in run().tensors if t.name == "w")
        values = load_file(source / "model.safetensors")["w"]
        finite = values[values.isfinite()].double()
        assert record.absmax == finite.abs().max().item()
        assert record.rms == pytest.approx(finite.square().mean().sqrt().item())
        assert record.sqnr_db is not None
        assert record.sqnr_db > 60

    @pytest.mark.parametrize("format", ["fp16", "bf16", "e4m3fn", "e5m2"])
    @pytest.mark.parametrize("size", [3e38, 1e20, 1e-25, 1e-35])
    def test_errors_whose_squares_leave_fp32(
        self, run: Run, source: Path, output: Path, format: str, size: float
    ) -> None:
        x = torch.linspace(0.3, 1, 64).view(8, 8) * size
        write_checkpoint(source, {"w": x})
        record = run(format=format).tensors[0]
        with OutputReader.of(read_output(output)) as reader:
            error = reader.values("w", 0, 64).double() - x.view(-1).double()
        wanted = 10 * math.log10(x.double().square().sum().item() / error.square().sum().item())
        assert record.sqnr_db == pytest.approx(wanted, abs=0.01)

    @pytest.mark.parametrize("value", [0.0, 1e-45, NAN, INF])
    @pytest.mark.parametrize("method", ["unit", "scalify", "collage"])
    def test_tensors_of_one_extreme_value(self, run: Run, source: Path, value: float, method: str) -> None:
        write_checkpoint(source, {"w": torch.full((4, 4), value)})
        assert run(method=method).verify.passed


# Every dtype torch can hold, and shapes without elements or without axes.
ODD_TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "empty vector": torch.zeros(0),
    "bool": torch.tensor([[True, False], [False, True]]),
    "int64": torch.tensor([[-(2**62), 5], [0, 1]]),
    "uint16": torch.tensor([[1, 65535]], dtype=torch.uint16),
    "e4m3fn": torch.linspace(-9, 9, 16).view(4, 4).to(torch.float8_e4m3fn),
    "e5m2": torch.linspace(-9, 9, 16).view(4, 4).to(torch.float8_e5m2),
    "complex64": torch.complex(torch.ones(2, 2), torch.zeros(2, 2)),
}


class TestTensors:
    @pytest.mark.parametrize("method", ["unit", "scalify", "collage"])
    def test_what_is_no_matrix_of_floats_is_kept_bit_for_bit(
        self, run: Run, source: Path, output: Path, method: str
    ) -> None:
        odd = {n: x for n, x in ODD_TENSORS.items() if n != "scalar" or method != "collage"}
        write_checkpoint(source, odd)
        result = run(method=method)
        assert {t.action for t in result.tensors} == {"keep"}
        assert any("copy" in w for w in result.warnings)
        stored = load_file(output / "model.safetensors")
        for name, x in odd.items():
            assert (stored[name].dtype, stored[name].shape) == (x.dtype, x.shape)
            assert bits_of(stored[name]) == bits_of(x), name

    @pytest.mark.parametrize("method", ["unit", "collage"])
    def test_restore_gives_them_all_back(
        self, run: Run, source: Path, output: Path, tmp_path: Path, method: str
    ) -> None:
        write_checkpoint(source, ODD_TENSORS)
        run(method=method, **({"residual": "exact16"} if method == "collage" else {"format": "fp32"}))
        restore(output, tmp_path / "back", force=False, progress=Silent())
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert {n: bits_of(x) for n, x in back.items()} == {n: bits_of(x) for n, x in ODD_TENSORS.items()}

    def test_a_rule_converts_a_scalar(self, run: Run, source: Path, output: Path) -> None:
        write_checkpoint(source, {"scalar": torch.tensor(1.5)})
        run(rules=(FormatRule(pattern="*", format="fp16"),))
        stored = load_file(output / "model.safetensors")
        assert stored["scalar"].shape == (1,)
        assert (stored["scalar"] * stored["scalar_scale"]).item() == 1.5

    @pytest.mark.parametrize(
        ("odd", "format", "wanted"),
        [
            (-0.0, "int4", False), (-0.0, "e4m3fn", True), (math.inf, "e4m3fn", False), (math.inf, "e5m2", True),
            (math.nan, "e4m3fn", False),
        ],
    )  # fmt: skip
    def test_restored_weights_are_called_exact_only_if_they_have_all_bits(
        self, run: Run, source: Path, output: Path, tmp_path: Path, odd: float, format: str, wanted: bool
    ) -> None:
        """All other numbers are on the grid of the format."""
        x = torch.tensor([-2.0, -1, 0, 1, 2, 3, 3.5, 0.5]).repeat(64).view(16, 32)
        x[x == 0] = odd
        write_checkpoint(source, {"w": x})
        run(format=format, granularity="group:32" if format == "int4" else "row", verify="none")
        exact = restore(output, tmp_path / "back", force=False, progress=Silent()).exact
        is_same = bits_of(load_file(tmp_path / "back" / "model.safetensors")["w"]) == bits_of(x)
        assert exact == is_same == wanted

    @pytest.mark.parametrize(("method", "format"), [("unit", "fp32"), ("collage", "bf16")])
    def test_64_bit_weights_are_not_said_to_come_back_exactly(
        self, run: Run, source: Path, output: Path, tmp_path: Path, method: str, format: str
    ) -> None:
        write_checkpoint(source, {"w": torch.full((4, 4), 1 / 3, dtype=torch.float64)})
        result = run(method=method, format=format, **({"residual": "exact16"} if method == "collage" else {}))
        assert any("F64" in w for w in result.warnings)
        assert not restore(output, tmp_path / "back", force=False, progress=Silent()).exact

    def test_64_bit_numbers_beyond_fp32_are_not_called_infinite_in_the_source(self, run: Run, source: Path) -> None:
        write_checkpoint(source, {"w": torch.full((4, 4), 1e308, dtype=torch.float64)})
        (warning,) = (w for w in run(format="fp16", verify="none").warnings if "Inf" in w)
        assert ("fp32" in warning, "`w`" in warning) == (True, True)

    def test_names_that_are_only_odd(self, run: Run, source: Path, output: Path, tmp_path: Path) -> None:
        names = ("../../x", "/abs", "q\"uo'te", "back\\slash", "émoji😀", "a b", "", "<b>", "|`*", "x" * 500)
        tensors = {n: torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(names)}
        write_checkpoint(source, tensors)
        run(format="fp32")
        assert "<b>" not in (output / "report.html").read_text()
        restore(output, tmp_path / "back", force=False, progress=Silent())
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert {n: bits_of(x) for n, x in back.items()} == {n: bits_of(x) for n, x in tensors.items()}
        assert {p.name for p in tmp_path.iterdir()} == {"source", "output", "back"}

    def test_a_source_that_has_scales_already(self, run: Run, source: Path, output: Path) -> None:
        write_checkpoint(source, {"w": torch.ones(4, 4), "w_scale": torch.ones(1)})
        assert "`w_scale`" in refusal(run, output).message

    @pytest.mark.parametrize("is_declared", [True, False])
    def test_halves_that_are_equal_or_declared_a_tie_but_not_both_are_kept(
        self, run: Run, source: Path, is_declared: bool
    ) -> None:
        tensors = {"wte.weight": torch.ones(4, 4), "lm_head.weight": torch.full((4, 4), 1.0 - is_declared)}
        write_checkpoint(source, tensors, config={"tie_word_embeddings": is_declared})
        result = run()
        assert {t.name: t.action for t in result.tensors} == dict.fromkeys(tensors, "convert")
        assert any("`lm_head.weight` to `wte.weight`" in w for w in result.warnings) == is_declared

    def test_embeddings_of_encoder_and_decoder_are_tied_to_a_shared_one_only(
        self, run: Run, source: Path, output: Path
    ) -> None:
        """A T5Gemma has two of them, and a config that ties the decoder's to the head."""
        tensors = {f"{part}.embed_tokens.weight": torch.ones(4, 4) for part in ("encoder", "decoder")}
        for changed, shared, num_ties in ((1.0, False, 0), (2.0, False, 0), (1.0, True, 2)):
            tensors["encoder.embed_tokens.weight"].fill_(changed)
            more = {"shared.weight": torch.ones(4, 4)} if shared else {}
            write_checkpoint(source, tensors | more, config={"tie_word_embeddings": True})
            found = run(verify="weights", force=True)
            assert sum(t.action == "tie" for t in found.tensors) == num_ties
