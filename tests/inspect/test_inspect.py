"""`lpconv inspect` as typed: what its first line says and how it ends."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.inspect.headers import inspect
from lpconv.plan.options import ConvertOptions
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.foreign_files import make_foreign


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *(str(w) for w in words)])


def demo_as(folder: Path, settings: dict[str, object]) -> Path:
    """The demo with a quantization_config."""
    shutil.copytree(demo_checkpoint(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def test_the_verdict_comes_first_and_tensors_only_with_all() -> None:
    text = run("demo").stdout
    assert text.startswith("demo: No ")
    assert "q_proj" not in text
    assert "model.layers.0.self_attn.q_proj.weight" in run("demo", "--all").stdout


def test_weights_of_16_bits_are_not_quantised(tmp_path: Path) -> None:
    for name, bits in {"fp16": "None", "e4m3fn": "8."}.items():
        convert("demo", tmp_path / name, ConvertOptions(method="unit", format=name, verify="none"))
        assert str(inspect(tmp_path / name).bits_per_weight).startswith(bits)


def test_a_layout_that_is_not_read_is_not_called_fine(tmp_path: Path) -> None:
    path = demo_as(tmp_path / "model", {"quant_method": "hqq"})
    plain, strict = run(path), run(path, "--strict")
    assert plain.exit_code == 0
    assert "`hqq`" in " ".join(plain.stdout.split())
    assert strict.exit_code == 4


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_integers_of_other_bits_are_unsupported(tmp_path: Path, method: str) -> None:
    done = run(demo_as(tmp_path / "model", {"quant_method": method, "bits": 1, "group_size": 32}))
    assert done.exit_code == 4
    assert "1-bit integers" in " ".join(done.stdout.split())


def test_integers_of_one_bit_in_compressed_tensors_are_unsupported_and_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_foreign("ct W4A16", demo_checkpoint(), path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 1
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_packed")]:
        rows, cols = tensors[name.removesuffix("_packed") + "_shape"].tolist()
        tensors[name] = torch.zeros(rows, -(-cols // 32), dtype=torch.int32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    done = run(path)
    assert done.exit_code == 4, done.output
    assert "1-bit integers" in done.stdout
    assert "incomplete" not in done.output


def test_a_group_of_a_config_may_lack_the_settings_of_weights(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}}}
    done = run(demo_as(tmp_path / "model", config))
    assert done.exit_code == 5, done.output


def test_scalars_under_the_names_of_mlx_are_no_weight(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.zeros((), dtype=torch.uint32), "x.scales": torch.ones(())}
    config = {"quantization_config": {"quant_method": "mlx", "group_size": 32}}
    done = run(write_checkpoint(tmp_path / "model", tensors, config=config))
    assert done.exit_code == 5, done.output


@pytest.mark.parametrize(
    ("key", "expressions", "code", "says"),
    [("ignore", ["re:.*q_proj$"], 5, "q_proj"), ("ignore", ["re:(a+)+$", r"re:(\w+\.?)+\d$", "lm_*"], 0, ""),
     ("ignore", [r"re:(?:(.)|(..))+(?=[#%])x?"], 5, "over 5 s"),
     ("ignore", ["re:((a{1000}){1000}){1000}"], 5, "too"),
     ("targets", [r"re:(?:(.)|(..))+(?=[#%])x?"], 3, "over 5 s"), ("targets", ["re:.*", "re:("], 0, "")],
)  # fmt: skip
def test_expressions_of_strangers_end(tmp_path: Path, key: str, expressions: list[str], code: int, says: str) -> None:
    path = tmp_path / "model"
    make_foreign("ct W4A16", demo_checkpoint(), path)
    config = json.loads((path / "config.json").read_text())
    settings = config["quantization_config"]
    (settings if key == "ignore" else settings["config_groups"]["group_0"])[key] = expressions
    (path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(  # with `re`, only the end of the process would end the match
        [sys.executable, "-m", "lpconv", "inspect", path], capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def test_an_index_that_knows_nothing_is_a_few_lines(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.zeros(2, 2) for i in range(50)}
    write_checkpoint(tmp_path / "model", [tensors])
    index = {"weight_map": {f"other.{i}.weight": "model-00001-of-00001.safetensors" for i in range(50)}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    done = run(tmp_path / "model")
    assert done.exit_code == 5
    assert "`layer.0.weight`, " in done.stdout
    assert "`other.0.weight`, " in done.stdout
    assert len(done.output.splitlines()) < 40


def test_values_that_are_not_numbers_are_a_problem_once_they_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a.weight": torch.full((4, 4), torch.nan), "b.weight": torch.ones(4, 4)})
    headers, stats = run(tmp_path), run(tmp_path, "--stats")
    assert headers.exit_code == 0
    assert "(--stats)" in " ".join(headers.stdout.split())
    assert stats.exit_code == 5
    assert "`a.weight`: contains NaN" in stats.stdout
    assert "(--stats)" not in stats.stdout


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [("training_args.bin", 0), ("optimizer.pt", 0), ("scheduler.bin", 0), ("onnx/model.onnx", 0), ("tf_model.h5", 0),
     ("pytorch_model.bin", 5), ("mtp.safetensors", 5), ("onnx/model.gguf", 5)],
)  # fmt: skip
def test_strict_refuses_other_weights_but_not_what_a_trainer_leaves(tmp_path: Path, name: str, exit_code: int) -> None:
    path = tmp_path / "model"
    shutil.copytree(demo_checkpoint(), path)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"x")
    done = run(path, "--strict")
    assert done.exit_code == exit_code, done.output
    assert name in done.stdout
    assert "download" not in done.stderr  # nothing is damaged
