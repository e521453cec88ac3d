"""What a command refuses before torch, transformers or datasets are imported, which takes seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.data.texts import QUICK_BYTES
from lpconv.plan.options import ConvertOptions

REFUSED: dict[str, tuple[int, str]] = {
    "convert demo --method units": (2, "`units`"),
    "convert demo --method AWQ": (2, "--rounding gptq"),
    "convert demo --format fp61": (2, "`fp61`"),
    "convert demo --format fp6": (2, "e5m2, "),
    "convert demo --rule *=fp9": (2, "e5m2, "),
    "convert demo --verify none --gate top1>=0.9": (2, "--verify"),
    "inspect lfs": (5, "`git lfs pull`"),
    "convert demo --format int32": (2, "`int32`"),
    "convert demo --scheme fp8": (2, "FP8_DYNAMIC"),
    "convert demo --rule *emebd_tokens*=keep": (2, "`model.embed_tokens.weight`"),
    "convert adapter": (3, "`me/model`"),
    "convert no-layers": (3, "num_hidden_layers"),
    "convert demo --residual int8": (2, "--residual"),
    "convert demo --verify hash": (2, "`hash`"),
    "convert demo --gate snr>1": (2, "`snr`"),
    "convert demo --gate sqnr>>1": (2, "METRIC"),
    "convert demo --gate  --dry-run": (2, "--gate "),
    "convert demo --max-memory lots": (2, "4GB"),
    "convert demo --max-memory 1MB": (7, "--max-memory"),
    "convert some-org/some-model": (3, "some-model"),
    "convert demo -o taken": (8, "`taken`"),
    "convert /no/such": (3, "`/no/such`"),
    "convert empty": (3, "config.json"),
    "finetune demo --data none.txt": (3, "`none.txt`"),
    "finetune demo --data empty.txt": (3, "`empty.txt`"),
    "finetune demo --data a.csv --text-column txet": (2, "`txet`"),
    "finetune demo --data a.tsv --label-column lable": (2, "`lable`"),
    "finetune demo --data a.jsonl --text-column txet": (2, "`txet`"),
    "finetune demo --data no-text.csv": (2, "--text-column"),
    "finetune demo --data broken.jsonl": (3, "`broken.jsonl`"),
    "finetune demo --data a.jsonl --eval-data broken.jsonl": (3, "`broken.jsonl`"),
    "probe demo --data broken.jsonl": (3, " line 2"),
    "probe demo --data no-text.csv": (3, "`no-text.csv`"),
    "verify models/llama --against demo --data no-text.csv": (3, "`no-text.csv`"),
    "advise demo --data broken.jsonl": (3, "`broken.jsonl`"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate broken.jsonl": (3, "`broken.jsonl`"),
    "finetune demo --recipe unit-fp9": (2, "`unit-fp9`"),
    "finetune demo --task nothing": (2, "`nothing`"),
    "finetune demo --data chats.jsonl": (3, "`chats.jsonl`"),
    "advise demo --data chats.jsonl": (3, "`chats.jsonl`"),
    "probe demo --data chats.jsonl": (3, "`chats.jsonl`"),
    "finetune demo --data one.jsonl": (3, " 128 "),
    "finetune demo --data one.csv": (3, "row"),
    "finetune demo --data columns.parquet": (2, "a, b"),
    "probe demo --data columns.json": (3, "a, b"),
    "probe demo --data no-table.parquet": (3, "parquet"),
    "finetune demo --data large.csv": (2, "a, b"),
    "probe demo --data large.jsonl": (3, "a, b"),
    "finetune chat --data no-turns.jsonl": (3, "`no-turns.jsonl`"),
    "probe chat --data no-turns.jsonl": (3, "`no-turns.jsonl`"),
    "finetune chat --data chats.jsonl": (3, "answers"),
    "finetune chat --data images.jsonl": (3, "`image`"),
    "probe chat --data tools.jsonl": (3, "`tool_calls`"),
    "finetune foreign --data a.txt": (3, " 272 "),
    "finetune foreign --data foreign.jsonl": (3, " 272 "),
    "probe foreign --data a.txt": (3, " 272 "),
    "finetune t5": (2, "--label-column"),
    "finetune t5 --data chats.jsonl": (2, "--label-column"),
    "finetune t5 --dry-run": (4, "seq2seq"),
    "convert t5 --scheme W4A16": (4, "FP8_DYNAMIC"),
    "init t5 --reinit -o fresh": (4, "--method plain"),
    "convert lacking": (3, "`model.layers.1.mlp.up_proj.weight`"),
    "convert experts --scheme FP8_DYNAMIC": (4, "--exclude '*.experts.*'"),
    "convert llama4 --scheme FP8_DYNAMIC --exclude *.experts.*": (4, "--layout transformers"),
    "convert demo --scheme FP8_DYNAMIC --rule *embed*=e4m3fn": (4, "mlx"),
    "verify out --against wider": (3, "`wider`"),
    "finetune vit": (4, "`ViT"),
    "finetune whisper --task clm": (4, "`Whisper"),
    "init moe --reinit -o fresh": (4, "experts"),
    "bench vit": (4, "`ViT"),
    "bench t5": (4, "encoder"),
    "finetune no-tokenizer": (3, "tokenizer"),
    "advise nowhere": (3, "hint: `lpconv"),
    "advise no-tokenizer": (3, "tokenizer"),
    "verify out --against no/such/source": (3, "`no/such/source`"),
    "finetune demo --warmup 2": (2, "--warmup 2.0 "),
    "finetune demo --lr 0": (2, "--lr 0.0 "),
    "finetune demo --gate los<=1": (2, "`los`"),
    "finetune demo --gate \t": (2, "--gate "),
    "finetune demo --log-to foo": (2, "`foo`"),
    "finetune demo --log-to swanlab": (4, "swanlab"),
    "finetune demo --seq-len 1000000": (2, " 256 "),
    "probe demo --seq-len 1000000": (2, " 256 "),
    "advise demo --seq-len 1000000": (2, " 256 "),
    "verify models/llama --against demo --data a.csv --seq-len 1000000": (2, " 256 "),
    "verify models/llama --against bert": (3, "bert"),
    "advise t5": (4, "encoder"),
    "advise vit": (4, "--verify"),
    "probe t5": (4, "lpconv.track"),
    "probe vit": (4, "ViTForImageClassification"),
    "convert demo -o demo": (2, "demo-out"),
    "convert demo --include mlp": (2, "'*mlp*'"),
    "convert demo --max-memory 4": (2, "4GB"),
    "convert demo --max-shard-size 10": (2, "10GB"),
    "inspect out/never-made": (3, "directory"),
    "doctor --require nonsense": (2, "`nonsense`"),
    "doctor --require gpu": (4, "gpu"),
    "doctor --require ": (2, "--require "),
    "init bert-base --width 63 -o fresh": (2, " 64"),
    "bench demo --layers 99": (2, " 4"),
    "bench llama-8b --layers 99": (2, " 32"),
    "bench demo --processes 0": (2, "--processes"),
    "bench demo --format fp16 --method row": (2, "fp8"),
    "bench demo --method nvfp4": (2, "fp4"),
    "bench demo --method te": (4, "transformer_engine"),
    "batch defaults.json": (2, "`format: null`"),
    "finetune demo --recover": (4, "lpconv.json"),
    "finetune demo --recover --recipe fp32": (2, "--recipe"),
    "finetune out --recover --dry-run": (2, "--dry-run"),
    "finetune out --recover --gate loss_gap<=1": (2, "--recover"),
    "finetune demo --lora 4 --task classification": (2, "--lora"),
    "finetune demo --lora 4 --optimizer bf16": (2, "--optimizer"),
    "finetune demo --source demo": (2, "--source"),
    "finetune demo -o taken": (8, "`taken`"),
    "finetune empty": (3, "config.json"),
    "bench nosuch": (3, "`nosuch`"),
    "bench --format fp9": (2, "`fp9`"),
    "bench --format fp8,": (2, "--format "),
    "bench --mode trian": (2, "`trian`"),
    "bench --batch-size x": (2, "--batch-size x: "),
    "bench --compare none.json": (3, "none.json"),
    "bench demo --save /proc/x": (7, "`/proc`"),
    "bench demo --seq 128,9999": (2, " 256 "),
    "bench cut": (3, "cut/model.safetensors"),
    "probe cut": (3, "cut/model.safetensors"),
    "advise cut": (3, "cut/model.safetensors"),
    "finetune cut": (3, "cut/model.safetensors"),
    "export onnx cut -o onnx": (3, "cut/model.safetensors"),
    "probe demo --data empty.txt": (3, "`empty.txt`"),
    "probe demo --data short.txt": (3, " 128 "),
    "probe demo --data short.txt --seq-len 64": (3, " 64 "),
    "probe demo --data latin.txt": (3, "`latin.txt`"),
    "verify models/llama --against demo --data empty.txt": (3, "`empty.txt`"),
    "verify models/llama --against demo --data short.txt": (3, " 128 "),
    "verify models/llama --against demo --data short.txt --seq-len 64": (3, " 64 "),
    "convert demo --scheme W4A16 --rounding gptq --calibrate short.txt": (3, "--calibrate demo"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate no-text.csv": (3, "`text`"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate numbers.jsonl": (3, "pass a file"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate empty": (3, "directory"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate demo --calibration-tokens 99999999999": (
        7,
        "--calibration-tokens",
    ),
    "convert demo --scheme W4A16 --calibrate demo": (2, "--rounding gptaq"),
    "convert demo --bits 3.7 --rule *q_proj*=int8": (2, "=8 "),
    "convert demo --scheme W4A16 --bits 3.7": (2, "--scheme W4A16 "),
    "convert masked --scheme W4A16 --rounding gptq --calibrate self": (4, "`BertForMaskedLM`"),
    "convert t5 --scheme W4A16 --rounding gptq --calibrate self": (4, "--calibrate FILE"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate none.txt": (3, "`none.txt`"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate demo --shard 1/2": (2, " order"),
    "convert demo --scheme W4A16 --rounding gptq --calibrate demo --measure": (2, "--dry-run"),
    "convert demo --scheme W4A16 --dry-run --measure": (2, "--measure"),
    "convert vit --scheme W4A16 --rounding gptq --calibrate demo --dry-run": (4, "`ViTForImageClassification`"),
    "convert vit --scheme W4A16 --rounding gptq --calibrate demo": (4, "`ViTForImageClassification`"),
    "convert no-tokenizer --scheme W4A16 --rounding gptq --calibrate self": (3, "tokenizer"),
    "verify no-tokenizer --against no-tokenizer --data a.txt": (3, "tokenizer"),
    "convert demo --rule *q_proj*=int4": (2, "--granularity row"),
    "convert demo --format e4m3fn --rounding gptq --calibrate demo --include *norm*": (4, " 8 bits"),
    "convert demo --format e4m3fn --rounding gptq --calibrate demo --include *norm* --dry-run": (4, " 8 bits"),
    "verify models/llama --against demo --tasks none.yaml": (3, "`none.yaml`"),
    "verify out --against demo --data a.txt --detect 1e-300": (2, "--detect"),
    "verify out --against demo --gate nearest>=0.9": (2, "--level values"),
    "verify models/llama --tasks arc_easy": (2, "--tasks"),
    "verify models/llama --against demo --gate task:x:acc_drop<=0": (2, "answers"),
    "finetune demo --data latin.txt": (3, "`latin.txt`"),
    "finetune demo --data short.txt": (3, " 128 "),
    "finetune demo --data ends.txt": (3, "`ends.txt` has 20 tokens"),
    "probe demo --data ends.txt": (3, "`ends.txt` has 20 tokens"),
    "finetune demo --task classification": (2, "classification"),
    "finetune demo --task classification --data no-label.csv": (2, "classification"),
    "finetune demo --text-column nope": (2, "--text-column"),
    "export onnx demo --opset 3 -o x": (2, "opset 3 "),
    "init demo --reinit --width 7 -o fresh": (2, " 64"),
    "init demo --reinit --layers 99999999 -o fresh": (2, "below 10001"),
    "bench --device tpu": (2, "`tpu`"),
    "probe demo --data none.txt": (3, "`none.txt`"),
    "probe demo -o taken": (8, "`taken`"),
    "demo -o taken": (8, "`lpconv demo`"),
    "probe demo -o empty.txt/out": (7, "`empty.txt/out`"),
    "advise demo -o taken": (8, "`taken`"),
    "advise demo -o empty.txt/out": (7, "`empty.txt/out`"),
    "export onnx /no/such -o out": (3, "`/no/such`"),
    "export onnx demo -o taken": (8, "`taken`"),
    "restore /no/such -o out": (3, "`/no/such`"),
    "verify /no/such": (3, "`/no/such`"),
    "verify taken --level hsah": (2, "`hsah`"),
    "verify out --attestation out/config.json": (3, "`out/config.json`"),
    "attest /no/such": (3, "`/no/such`"),
    "attest out -o out/new.json": (2, "`out/new.json`"),
    "verify out --html taken": (8, "directory"),
    "batch none.yaml": (3, "none.yaml"),
    "report /no/such": (3, "`/no/such`"),
    "report empty": (3, "empty"),
    "verify otu": (3, "`out`"),
    "report otu": (3, "`out`"),
    "inspect otu": (3, "`out`"),
    "inspect ./otu": (3, "`out`"),
    "inspect models/lama": (3, "`models/llama`"),
    "inspect models": (3, ": llama"),
}
# What is done without them.
DONE = [
    "convert chat --scheme W4A16 --rounding gptq --calibrate talk.jsonl --dry-run",
    "doctor",
    "doctor --aliases",
    "inspect demo",
    "inspect out",
    "convert demo --dry-run",
    "convert demo --format FP4 --granularity MX --dry-run",
    "convert demo --format float8_e4m3fn --rule *.q_proj*=FP16 --dry-run",
    "convert demo --scheme fp8_dynamic --dry-run",
    "convert demo --method multipoint --dry-run",
    "verify out",
    "attest out --json",
    "report out",
]
# What the commands call; torch is imported inside, after the checks.
ENTRANCES = [
    "lpconv.advise.run", "lpconv.batch.reading", "lpconv.batch.run", "lpconv.report.batch", "lpconv.bench.run",
    "lpconv.convert.parts", "lpconv.convert.restore", "lpconv.convert.run", "lpconv.verify.run", "lpconv.export.run",
    "lpconv.verify.attest", "lpconv.init.run", "lpconv.probe.run", "lpconv.train.run",
]  # fmt: skip
# One process for all of them: it names the heavy libraries that are loaded after each.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from lpconv.cli.main import app
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, line.split(" "))
    heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
    print(json.dumps([line, done.exit_code, done.stderr, heavy]))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    folder = tmp_path_factory.mktemp("early")
    for name in ("taken", "empty", "adapter", "models"):
        (folder / name).mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "me/model"}')
    shutil.copytree(demo_checkpoint(), folder / "models" / "llama")
    (folder / "taken" / "mine").touch()
    for name, text in {
        "empty.txt": "",
        "a.csv": "text,label\nx,1\n",
        "a.tsv": "text\tlabel\nx\t1\n",
        "a.jsonl": '{"text": "x"}\n{"text": "y", "label": 1}\n',
        "chats.jsonl": '{"messages": [{"role": "user", "content": "x"}]}\n',
        "one.jsonl": '{"text": "x"}\n',
        "one.csv": "text,label\nx,1\n",
        "numbers.jsonl": '{"text": 5}\n',
        "no-turns.jsonl": '{"messages": []}\n' * 2,
        "talk.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
        "images.jsonl": '{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}\n',
        "tools.jsonl": '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}\n',
        "foreign.jsonl": json.dumps({"text": "<19>" * 999}),
        "a.txt": "<19>" * 999,
        "broken.jsonl": '{"text": "x"}\n{"text": y}\n',
        "no-text.csv": "a,b\n1,2\n",
        "no-label.csv": "text,b\n1,2\n",
        "short.txt": "hi\n",
        "no-table.parquet": "PAR1",
        "columns.json": '[{"a": "x", "b": 1}]',
        "large.csv": "a,b\n" + QUICK_BYTES // 4 * "x,1\n",
        "large.jsonl": QUICK_BYTES // 16 * '{"a": 1, "b": 2}\n',
        "ends.txt": "<|endoftext|>" * 20,
        "defaults.json": '{"version": 1, "defaults": {"format": "fp16"}, '
        '"jobs": [{"id": "a", "model": "demo", "scheme": "FP8_DYNAMIC"}]}',
    }.items():
        (folder / name).write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": [1]}), folder / "columns.parquet")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    changes: dict[str, dict[str, Any]] = {
        "demo-plain": {},
        "demo-fp8": {"quantization_config": {"quant_method": "fp8"}},
        "no-layers": {"num_hidden_layers": None},
        "t5": {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        "vit": {"architectures": ["ViTForImageClassification"], "vocab_size": None, "image_size": 224},
        "bert": {"model_type": "bert"},
        "masked": {"architectures": ["BertForMaskedLM"]},
        "moe": {"num_experts": 4, "num_experts_per_tok": 2},
        "whisper": {"architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80},
        "llama4": {"model_type": "llama4_text"},
        "no-tokenizer": {},
    }
    for name, settings in changes.items():
        shutil.copytree(demo_checkpoint(), folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        config = {key: value for key, value in (config | settings).items() if (key, value) != ("vocab_size", None)}
        (folder / name / "config.json").write_text(json.dumps(config))
    save_file({"embeddings": torch.ones(4, 4)}, folder / "bert" / "model.safetensors")
    (folder / "no-tokenizer" / "tokenizer.json").unlink()
    for name in ("cut", "lfs"):
        shutil.copytree(demo_checkpoint(), folder / name)
    (folder / "lfs" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    os.truncate(folder / "cut" / "model.safetensors", 5000)
    for name in ("chat", "experts", "foreign", "lacking", "wider"):
        shutil.copytree(demo_checkpoint(), folder / name)
    (folder / "chat" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = json.loads((folder / "foreign" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": 257 + i, "content": f"<{i}>"} for i in range(20)
    ]
    (folder / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "lacking" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "lacking" / "model.safetensors")
    weights["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(2, 8, 8)
    save_file(weights, folder / "experts" / "model.safetensors")
    weights = {name: torch.cat([x, x]) for name, x in load_file(folder / "wider" / "model.safetensors").items()}
    save_file(weights, folder / "wider" / "model.safetensors")
    convert("demo", folder / "out", ConvertOptions(verify="none"))
    command = [sys.executable, "-c", PROGRAM, json.dumps([*REFUSED, *DONE])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    there = sorted(p.name for p in folder.iterdir() if p.is_dir())
    assert there == [
        "adapter", "bert", "chat", "cut", "demo-fp8", "demo-plain", "empty", "experts", "foreign", "lacking",
        "lfs", "llama4", "masked", "models", "moe", "no-layers", "no-tokenizer", "out", "t5", "taken", "vit", "whisper",
        "wider",
    ]  # fmt: skip
    return {line: (code, said, heavy) for line, code, said, heavy in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_before_torch(line: str, refusals: dict[str, tuple[int, str, list[str]]]) -> None:
    code, words = REFUSED[line]
    found, said, heavy = refusals[line]
    assert (found, heavy) == (code, []), said
    assert words in said
    assert "hint:" in said


def test_the_entrances_of_engines_load_without_torch() -> None:
    code = (
        f"import {', '.join(ENTRANCES)}, sys; print({{'torch', 'transformers', 'datasets', 'gguf'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("export demo", "lpconv export onnx demo"),
        ("export gguf demo", "GGUF_Q8_0"),
        ("export demo --to onnx", "lpconv export onnx demo"),
        ("export demo onnx", "lpconv export onnx demo"),
        ("quantize demo", "convert."),
        ("export trt demo", "demo`"),
    ],
)
def test_what_other_tools_call_otherwise_is_answered(typed: str, suggested: str) -> None:
    done = CliRunner().invoke(app, typed.split(), env={"TERMINAL_WIDTH": "120"})
    assert done.exit_code == 2
    assert suggested in done.stderr


@pytest.mark.parametrize("line", DONE)
def test_it_is_done_without_torch(line: str, refusals: dict[str, tuple[int, str, list[str]]]) -> None:
    code, said, heavy = refusals[line]
    assert (code, heavy) == (0, []), said


def test_a_column_that_only_later_rows_have_is_found(tmp_path: Path) -> None:
    from lpconv.train.data import check_data
    from lpconv.train.options import FinetuneOptions
    from lpconv.train.recipes import arithmetic

    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y", "kind": 1}\n')
    check_data(FinetuneOptions(arithmetic=arithmetic(), data=str(tmp_path / "a.jsonl"), label_column="kind"))


def test_the_places_to_log_to_are_those_of_transformers() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from lpconv.train.options import LOGGERS

    assert set(LOGGERS) == set(INTEGRATION_TO_CALLBACK)
