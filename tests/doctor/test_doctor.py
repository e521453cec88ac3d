"""What the machine can do: rules on made-up devices, and one look at this machine."""

import importlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lpconv
from lpconv import doctor
from lpconv.doctor import EXTRAS, cpu_device, examine, format_support, gpu_problem, require, try_products
from lpconv.errors import UnsupportedError, UsageError
from lpconv.kernels.matmul import matmul
from lpconv.report.doctor import alias_table, doctor_document
from lpconv.report.document import Cell, Table
from lpconv.results.doctor import DeviceRecord, DoctorResult, PackageRecord
from lpconv.storage.aliases import ALIASES
from tests.helpers.report_examples import blocks_of

PYPROJECT = Path(lpconv.__file__).parent.parent / "pyproject.toml"
PLAIN_CPU = cpu_device("model name : Old\nflags : fpu sse2 avx2\n")
BF16_CPU = cpu_device("model name : New\nflags : fpu avx2 avx512f avx512_bf16 amx_bf16\n")


def gpu(major: int, minor: int, *, problem: str | None = None) -> DeviceRecord:
    return DeviceRecord(kind="cuda", name="GPU", index=0, capability=(major, minor), problem=problem)


def levels(device: DeviceRecord) -> dict[str, str]:
    return {s.format: s.level for s in format_support(device)}


@pytest.fixture(scope="module")
def here() -> DoctorResult:
    return examine()


def machine_with(here: DoctorResult, *devices: DeviceRecord) -> DoctorResult:
    return replace(here, devices=devices, formats=tuple(s for d in devices for s in format_support(d)))


class TestFormats:
    def test_a_cpu_without_16_bit_units_has_fp32_only(self) -> None:
        assert {f for f, level in levels(PLAIN_CPU).items() if level == "native"} == {"fp32"}

    def test_cpu_flags_make_bf16_native_and_fp8_decode_to_it(self) -> None:
        support = {s.format: s for s in format_support(BF16_CPU)}
        assert support["bf16"].level == "native"
        assert support["fp16"].level == "emulated"
        assert " bf16" in support["e4m3fn"].note
        assert " fp32" in support["fp16"].note

    @pytest.mark.parametrize(
        ("capability", "native"),
        [
            ((6, 1), {"fp32"}),
            ((7, 5), {"fp32", "int8", "fp16"}),
            ((8, 6), {"fp32", "int8", "fp16", "bf16", "tf32"}),
            ((8, 9), {"fp32", "int8", "fp16", "bf16", "tf32", "e4m3fn", "e5m2"}),
            ((9, 0), {"fp32", "int8", "fp16", "bf16", "tf32", "e4m3fn", "e5m2"}),
            ((10, 0), {"fp32", "int8", "fp16", "bf16", "tf32", "e4m3fn", "e5m2", "e2m1", "e8m0fnu"}),
        ],
    )
    def test_gpus_by_compute_capability(self, capability: tuple[int, int], native: set[str]) -> None:
        assert {f for f, level in levels(gpu(*capability)).items() if level == "native"} == native


class TestProducts:
    def test_a_cpu_decodes(self) -> None:
        ((level, note),) = {(p.level, p.note) for p in try_products(BF16_CPU)}
        assert level == "emulated"
        assert note.endswith("bf16")

    def test_a_gpu_multiplies_each_layout_rightly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a CPU, as which the GPU is made up here, the same products are exact enough."""
        monkeypatch.setattr(DeviceRecord, "label", "cpu")
        assert [(p.level, p.note) for p in try_products(gpu(9, 0))] == [("native", "")] * 3

    def test_a_kernel_with_wrong_numbers_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DeviceRecord, "label", "cpu")
        module = importlib.import_module("lpconv.kernels.matmul")  # the package gives the function of that name
        monkeypatch.setattr(module, "matmul", lambda a, b, **scales: matmul(a, b, **scales) * 1.5)
        ((level, note),) = {(p.level, p.note) for p in try_products(gpu(9, 0))}
        assert level == "error"
        assert note.endswith(" 0.5")


class TestRequire:
    def test_each_missing_thing_is_named_with_what_to_do(self, here: DoctorResult) -> None:
        lacking = PackageRecord(name="onnxruntime", required=">=1.22", extra="onnx", installed=None, ok=False)
        machine = replace(machine_with(here, PLAIN_CPU, gpu(8, 0)), packages=(lacking,))
        with pytest.raises(UnsupportedError) as caught:
            require(["fp8", "bf16", "onnx"], machine)
        assert caught.value.exit_code == 4
        assert "fp8 (emulated" in caught.value.message
        assert "onnxruntime" in caught.value.message
        assert "bf16" not in caught.value.message
        assert " 8.9" in str(caught.value.hint)
        assert "'lpconv[onnx]'" in str(caught.value.hint)
        json.dumps(caught.value.to_dict())

    def test_a_gpu_that_cannot_be_used_says_why(self, here: DoctorResult) -> None:
        with pytest.raises(UnsupportedError, match="GPU: old"):
            require(["gpu"], machine_with(here, PLAIN_CPU, gpu(5, 0, problem="old")))

    def test_an_unknown_name_gets_the_nearest(self, here: DoctorResult) -> None:
        with pytest.raises(UsageError) as caught:
            require(["onxx"], here)
        assert "`onnx`" in (caught.value.hint or "")


class TestExamine:
    def test_this_machine(self, here: DoctorResult) -> None:
        assert here.devices[0].kind == "cpu"
        assert {p.name: p.ok for p in here.packages}["torch"]

    @pytest.mark.parametrize(
        ("capability", "archs", "works"),
        [
            ((9, 0), ["sm_80", "sm_90"], True),
            ((8, 9), ["sm_80", "sm_90"], True),
            ((7, 0), ["sm_75", "sm_80"], False),
            ((12, 0), ["sm_90", "sm_100"], False),
            ((12, 0), ["sm_90", "compute_90"], True),
            ((9, 0), ["sm_90a"], True),
        ],
    )
    def test_gpus_that_a_torch_build_runs(self, capability: tuple[int, int], archs: list[str], works: bool) -> None:
        assert (gpu_problem(capability, archs) is None) == works

    def test_cpuinfo_of_arm(self) -> None:
        assert cpu_device("Features : fp asimd asimdhp bf16\n").features == ("asimdhp", "bf16")

    def test_torch_is_asked_where_a_gpu_may_be(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "_DEV", tmp_path)
        monkeypatch.setattr(doctor, "_gpus", lambda: (gpu(9, 0, problem="asked"),))
        assert [d.kind for d in examine().devices] == ["cpu"]
        (tmp_path / "nvidiactl").touch()
        assert [d.kind for d in examine().devices] == ["cpu"]
        (tmp_path / "nvidia3").touch()
        assert [d.kind for d in examine().devices] == ["cpu", "cuda"]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    if not PYPROJECT.exists():
        pytest.skip("an installed lpconv has no pyproject.toml")
    table: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return table


def test_extras_are_those_of_the_project(project: dict[str, Any]) -> None:
    assert set(EXTRAS) == set(project["optional-dependencies"])


def test_the_document_shows_devices_formats_and_problems(here: DoctorResult) -> None:
    document = doctor_document(machine_with(here, BF16_CPU, gpu(8, 9, problem="driver")))
    for expected in ("8.9", ": driver"):
        assert expected in document.facts["cuda:0"]
    levels_by_row = {
        row[:2]: (cell.text, cell.outcome)
        for table in blocks_of(document, Table)
        for row in table.rows
        if isinstance(cell := row[2], Cell)
    }
    assert levels_by_row["bf16", "cpu"] == ("native", "passed")
    assert levels_by_row["e4m3fn", "cpu"] == ("emulated", "not run")


def test_every_alias_has_its_row() -> None:
    rows = alias_table((a.family, a.name, a.repo_id) for a in ALIASES.values()).rows
    assert ("BERT", "bert-large", "google-bert/bert-large-uncased") in rows
