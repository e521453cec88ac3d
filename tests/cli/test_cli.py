"""The command line as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lpconv.cli.handling import handle_failures
from lpconv.cli.main import app

runner = CliRunner()
COMMANDS = tuple(typer.main.get_command(app).commands)


def lpconv(*args: str):  # type: ignore[no-untyped-def]
    return runner.invoke(app, list(args))


def document(*args: str) -> dict[str, object]:
    result = lpconv(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_neither_torch_nor_transformers(command: str) -> None:
    program = (
        "import sys\nfrom lpconv.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    args = [*([command] if command else []), "--help"]
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Usage" in done.stdout


def test_convert_without_loss_says_so_and_its_report_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found: Any = document("convert", "demo", "--method", "unit", "--format", "fp32", "-o", str(out), "-q")
    verify = found["verify"]
    assert verify["passed"] is True
    assert verify["logits"]["bit_equal"] is True
    assert verify["logits"]["max_abs_diff"] == 0
    assert verify["weights"]["max_rel_error"] == 0
    assert verify["weights"]["min_sqnr_db"] == "inf"
    assert json.loads((out / "report.json").read_text()) == found


def test_verbose_shows_where_an_error_came_from() -> None:
    done = lpconv("-v", "convert", "/no/such/folder")
    assert ("Traceback" in done.stderr, "hint:" in done.stderr, done.exit_code) == (True, True, 3)
    assert lpconv("inspect", "demo", "-q").stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("convert",), "MODEL"),
        (("nosuch",), "nosuch"),
        (("export", "onnx", "demo"), "--output"),
        (("convert", "demo", "--workers", "many"), "--workers"),
        (("bench", "demo", "--save", ""), "--save"),
        (("inspect", "demo", "--stat"), "--stats"),
    ],
)
def test_what_cannot_be_parsed_is_json_under_json(args: tuple[str, ...], words: str) -> None:
    done = lpconv(*args, "--json")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == done.exit_code == 2
    assert words in error["message"]
    assert error["hint"]
    assert "error: " in done.stderr


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("convert demo --dtype bf16", "--format"),
        ("finetune demo --torch_dtype bf16", "--precision"),
        ("convert demo --outtype q8_0", "GGUF_Q8_0"),
        ("convert demo --overwrite", "--force"),
        ("finetune demo --epochs 1", "updates"),
        ("convert demo --quantize", "--scheme"),
        ("finetune demo --bits 4", "--recipe"),
        ("convert demo --q-bits 4", "int4"),
        ("convert demo --w_bit=4", "int4"),
        ("convert demo --group-size 64", "group:64"),
        ("convert demo --out x", "--output"),
        ("bench demo --outfile x", "--save"),
        ("finetune demo --learning-rate 1", "--lr"),
        ("finetune demo --per_device_train_batch_size 1", "--batch-size"),
        ("finetune demo --num-train-epochs 1", "--steps"),
        ("finetune demo --dataset x", "--data"),
        ("convert demo --dataset x", "--calibrate"),
        ("probe demo --max_seq_length 8", "--seq-len"),
        ("finetune demo --report_to wandb", "--log-to"),
        ("convert --hf-path x", "MODEL"),
        ("convert --model_name_or_path x", "MODEL"),
        ("inspect demo --nonsense", "nonsense"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_ours(line: str, ours: str) -> None:
    message = json.loads(lpconv(*line.split(), "--json").stdout)["error"]["message"]
    assert ours in message.partition(" ")[2]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("convert --model demo --output-dir out --dry-run -q -v", 0),
        ("convert --format fp8 --model=demo --output_dir=out --dry-run", 0),
        ("inspect demo -v", 0),
        ("inspect --model demo -q", 0),
        ("doctor -q --aliases", 0),
        ("bench --model /no/such --batch 1 --seq 8 --revision x -q -v", 3),
        ("bench /no/such --batch-size 1 --seq_len 8", 3),
    ],
)
def test_usual_flags_are_accepted_wherever_they_make_sense(line: str, code: int) -> None:
    assert lpconv(*line.split()).exit_code == code


@pytest.mark.parametrize(
    "args", [("inspect", "demo"), ("doctor", "--aliases"), ("doctor",), ("convert", "demo", "--dry-run")], ids=str
)
def test_every_document_has_a_schema_version(args: tuple[str, ...]) -> None:
    assert document(*args)["schema_version"] == 1


def test_a_failed_requirement_is_the_only_document() -> None:
    done = lpconv("doctor", "--require", "gpu", "--json")
    assert json.loads(done.stdout)["error"]["code"] == 4


def test_a_command_leaves_the_handler_of_sigterm_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for args in (("doctor", "--aliases"), ("inspect", "/no/such")):
        lpconv(*args)
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_while_an_object_is_deleted_ends_the_command() -> None:
    """Python drops exceptions there."""

    class Deleted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    @handle_failures
    def command() -> None:
        Deleted()
        time.sleep(20)

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 143


@pytest.mark.parametrize("args", [("inspect", "demo"), ("inspect", "demo", "--json"), ("doctor", "--aliases")])
def test_a_full_disk_behind_stdout_is_a_lack_of_resources(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "lpconv", *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "Exception" in done.stderr) == (7, False), done.stderr
    assert "hint:" in done.stderr


@pytest.mark.parametrize("words", [("convert", "demo"), ("finetune", "demo"), ("export", "onnx", "demo")])
def test_an_option_is_no_directory_to_write(words: tuple[str, ...]) -> None:
    done = lpconv(*words, "--output", "--json")
    assert done.exit_code == 2
    assert "./--json" in " ".join(done.stderr.split())
    assert not Path("--json").exists()
    empty = lpconv(*words, "-o", "")
    assert (empty.exit_code, "'--output'" in empty.stderr) == (2, True)
