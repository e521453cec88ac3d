"""Damaged files end in one of lpconv's errors with a hint, or in a correct output.

Nothing else may come out: no other exception, nothing published that the damage reached.
"""

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.inspect.headers import inspect
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.faults.forked import Ended
from tests.faults.fuzz import fault_of, is_finished
from tests.faults.fuzz_inputs import damaged_checkpoint
from tests.faults.material import make_llama
from tests.faults.mutations import BYTES, Damage, odd_value
from tests.helpers.checkpoints import DEMO_TENSORS, bits_of, published, write_checkpoint


def outcome(action: Callable[[], object], codes: set[int]) -> int:
    """The exit code of an action: 0, or one of `codes` with a hint and a message fit for a terminal."""
    try:
        action()
    except LpconvError as e:
        error = e
    else:
        return 0
    assert error.exit_code in codes, error
    assert error.hint
    return error.exit_code


def forget(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A folder for outputs only, so that all of them can be checked and deleted."""
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


OPTIONS = ConvertOptions(verify="weights", workers=1)


class TestHeader:
    def damaged(self, rng: random.Random, data: bytes, start: int, end: int) -> bytes:
        return data[:start] + rng.choice(BYTES)(rng, data[start:end]) + data[end:]

    @pytest.mark.parametrize(("seed", "part"), [(0, "header"), (1, "header"), (2, "length"), (3, "json")])
    def test_a_damaged_header(self, tmp_path: Path, outputs: Path, seed: int, part: str) -> None:
        source = write_checkpoint(tmp_path / "source")
        file = source / "model.safetensors"
        sound = file.read_bytes()
        end = 8 + int.from_bytes(sound[:8], "little")
        rng = random.Random(seed)
        codes: Counter[int] = Counter()
        for _ in range(120):
            if part == "json":
                head = odd_value(rng, sound[8:end])
                file.write_bytes(len(head).to_bytes(8, "little") + head + sound[end:])
            else:
                file.write_bytes(self.damaged(rng, sound, 0, end if part == "header" else 8))
            code = outcome(lambda: convert(str(source), outputs / "out", OPTIONS), {3, 4})
            codes[code] += 1
            if code == 0:
                self.check_that_safetensors_agrees(file, outputs / "out")
            else:
                assert not published(outputs / "out")
            inspect(source)  # says what is wrong, and raises nothing
            forget(outputs)
        assert codes[3] > 60, "most damage to a header is found"

    def check_that_safetensors_agrees(self, file: Path, output: Path) -> None:
        """What was converted in spite of its damage is a file that the safetensors library reads the same way."""
        try:
            read = load_file(file)
        except SafetensorError as e:
            pytest.fail(f"safetensors refuses what we converted: {e}")
        stored = load_file(output / "model.safetensors")
        for name, x in read.items():
            if name + "_scale" not in stored:
                assert bits_of(stored[name]) == bits_of(x)

    def test_a_damaged_payload_converts_and_verifies(self, tmp_path: Path, outputs: Path) -> None:
        source = write_checkpoint(tmp_path / "source")
        file = source / "model.safetensors"
        sound = file.read_bytes()
        start = 8 + int.from_bytes(sound[:8], "little")
        rng = random.Random(4)
        for i in range(40):
            damaged = bytearray(sound)
            for _ in range(4):
                damaged[rng.randrange(start, len(sound))] = rng.randrange(256)
            file.write_bytes(damaged)
            format = ("fp16", "fp32", "e4m3fn", "e5m2")[i % 4]
            result = convert(str(source), outputs / "out", ConvertOptions(format=format, verify="weights", workers=1))
            assert result.verify.passed
            again = verify_output(
                outputs / "out", VerifyOptions(against=str(source), level="weights"), progress=Silent()
            )
            assert again.problems == ()
            forget(outputs)


CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "tie_word_embeddings": True, "torch_dtype": "float32",
    "text_config": {"tie_word_embeddings": False}, "auto_map": {"AutoConfig": "x.Y"}, "quantization_config": None,
}  # fmt: skip


@pytest.mark.parametrize("damage", [odd_value, *BYTES])
def test_a_damaged_config(tmp_path: Path, outputs: Path, damage: Damage) -> None:
    source = write_checkpoint(tmp_path / "source")
    rng = random.Random(0)
    for i in range(40):
        (source / "config.json").write_bytes(damage(rng, json.dumps(CONFIG).encode()))
        options = ConvertOptions(method=("unit", "collage")[i % 2], verify="weights", workers=1)
        code = outcome(lambda options=options: convert(str(source), outputs / "out", options), {3, 4})  # type: ignore[misc]
        assert published(outputs / "out") == (code == 0)
        outcome(lambda: inspect(source), {3})
        forget(outputs)


@pytest.mark.parametrize("damage", [odd_value, *BYTES])
def test_a_damaged_index(tmp_path: Path, outputs: Path, damage: Damage) -> None:
    source = write_checkpoint(
        tmp_path / "source", [{"a": torch.ones(4, 4)}, {"b": torch.ones(4, 4), "c": torch.ones(3)}]
    )
    index = source / "model.safetensors.index.json"
    sound = index.read_bytes()
    rng = random.Random(0)
    for _ in range(40):
        index.write_bytes(damage(rng, sound))
        code = outcome(lambda: convert(str(source), outputs / "out", OPTIONS), {3, 4})
        assert published(outputs / "out") == (code == 0)
        outcome(lambda: inspect(source), {3})
        forget(outputs)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_pickle(tmp_path: Path, outputs: Path, legacy: bool) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "model.safetensors").unlink()
    file = source / "pytorch_model.bin"
    torch.save(DEMO_TENSORS, file, _use_new_zipfile_serialization=not legacy)
    sound = file.read_bytes()
    rng = random.Random(0)
    for _ in range(100):
        file.write_bytes(rng.choice(BYTES)(rng, sound))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols it has not seen
            code = outcome(lambda: convert(str(source), outputs / "out", OPTIONS), {3, 4})
        assert published(outputs / "out") == (code == 0)
        forget(outputs)


class TestOutput:
    """Outputs are inputs of `verify`, `restore` and `inspect`."""

    @pytest.mark.parametrize(
        ("method", "name"),
        [("unit", "lpconv.json"), ("unit", "SHA256SUMS"), ("unit", "config.json"), ("unit", "model.safetensors"),
         ("collage", "lpconv.json"), ("collage", "collage/residual.json"), ("collage", "collage/residual.safetensors")],
    )  # fmt: skip
    def test_a_damaged_file(self, tmp_path: Path, outputs: Path, method: str, name: str) -> None:
        source = write_checkpoint(tmp_path / "source")
        output = tmp_path / "converted"
        convert(str(source), output, ConvertOptions(method=method, verify="none", workers=1))
        sound = (output / name).read_bytes()
        rng = random.Random(0)
        damages = (*BYTES, *([odd_value] * 6 if name.endswith(".json") else ()))

        def verify(level: str) -> None:
            found = verify_output(output, VerifyOptions(against=str(source), level=level), progress=Silent())
            if name != "SHA256SUMS":  # a list with other line breaks is the same list
                assert found.passed == ((output / name).read_bytes() == sound)

        for _ in range(60):
            (output / name).write_bytes(rng.choice(damages)(rng, sound))
            outcome(lambda: verify("hash"), {3})
            outcome(lambda: verify("weights"), {3})
            outcome(lambda: inspect(output), {3})
            outcome(lambda: restore(output, outputs / "back", force=False, progress=Silent()), {3, 4})
            forget(outputs)


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (Ended(code=3, out='{"error": {"code": 3}}', err="error: a\nhint: b\n"), None),
        (Ended(code=1, out="", err="error: a\nhint: b\n"), "exit 1"),
        (Ended(code=3, out="", err="Traceback (most recent call last)\nerror: a\nhint: b\n"), "traceback"),
        (Ended(code=3, out='{"error": {"code": 3}}', err="error: a\n"), "hint"),
        (Ended(code=-11, out="", err=""), "signal 11"),
        (Ended(code=3, out="", err="error: a\nhint: b\n"), "no JSON"),
        (Ended(code=4, out='{"error": {"code": 3}}', err="error: a\nhint: b\n"), "code"),
    ],
)
def test_what_the_fuzzer_takes_for_a_fault(ended: Ended, fault: str | None) -> None:
    found = fault_of(("doctor", "--json"), ended)
    assert found is None if fault is None else fault in str(found)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "llama")
    return folder


@pytest.mark.parametrize("files", [["config.json"], ["*.safetensors"]], ids=str)
def test_a_few_inputs_of_the_fuzzer(
    files: list[str], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = damaged_checkpoint("llama", files=files, only=["convert", "inspect"])
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        trial = attack(random.Random(number), material, folder)
        done = CliRunner().invoke(app, list(trial.arguments))
        ended = Ended(code=done.exit_code, out=done.stdout, err=done.stderr)
        assert fault_of(trial.arguments, ended) is None, (trial, ended)
        assert ended.code == 0 or not any(map(is_finished, trial.outputs)), trial
