"""What every command does with checkpoints that lack weights, and with files in layouts that lpconv does not read.

    python -m benchmarks.attack.missing make --work DIRECTORY # with optimum-quanto, bitsandbytes, torchao, hqq, mlx-lm
    python -m benchmarks.attack.missing run --work DIRECTORY --out FILE.json

`make` lets those tools quantise the demo model on a CPU, each with its own writer; HQQ, which transformers does not
save, by the `state_dict` of its own layers. `run` plants damage in copies of the demo as well, and writes the exit code
of every command on every file, whether anything was published, and what `inspect` said. Neither needs a network.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import common

DEMO = common.ROOT / "lpconv/data/demo"
_DOWN = "model.layers.0.mlp.down_proj.weight"
State = dict[str, Tensor]


def make(work: Path) -> None:
    """Write what every tool that is here makes of the demo, and the tools' versions."""
    versions = common.versions(*_TOOLS)
    for package in versions:
        for name, write in _TOOLS[package].items():
            write(work / name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(DEMO / file, work / name / file)
    common.save(versions, work / "versions.json")


def _model(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, **options)


def _quanto(weights: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from optimum.quanto import QuantizedModelForCausalLM  # type: ignore[import-not-found]

        QuantizedModelForCausalLM.quantize(_model(), weights=weights, exclude="lm_head").save_pretrained(folder)

    return write


def _bitsandbytes(**settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from transformers import BitsAndBytesConfig

        _model(quantization_config=BitsAndBytesConfig(**settings), device_map="cpu").save_pretrained(folder)

    return write


def _torchao(kind: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        import torchao.quantization
        from transformers import TorchAoConfig

        config = TorchAoConfig(getattr(torchao.quantization, kind)())
        _model(quantization_config=config, device_map="cpu").save_pretrained(folder)

    return write


def _hqq(folder: Path) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[import-not-found]

    model, state = _model(), State()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            settings = BaseQuantizeConfig(nbits=4, group_size=64)
            layer = HQQLinear(module, settings, compute_dtype=module.weight.dtype, device="cpu", del_orig=False)
            state |= {f"{name}.{key}": x.contiguous() for key, x in layer.state_dict().items()}
    linears = {n.rpartition(".")[0] for n in state}
    state |= {n: x for n, x in load_file(DEMO / "model.safetensors").items() if n.rpartition(".")[0] not in linears}
    _write(folder, state)


def _mlx(folder: Path) -> None:
    from mlx_lm import convert  # type: ignore[import-not-found]

    convert(str(DEMO), mlx_path=str(folder), quantize=True, q_bits=4, q_group_size=64)


_TOOLS: dict[str, dict[str, Callable[[Path], None]]] = {
    "optimum-quanto": {f"quanto {w}": _quanto(w) for w in ("qint8", "qint4", "qfloat8")},
    "bitsandbytes": {
        "bitsandbytes 8 bits": _bitsandbytes(load_in_8bit=True),
        "bitsandbytes 4 bits": _bitsandbytes(load_in_4bit=True),
    },
    "torchao": {f"torchao {k}": _torchao(f"{k}WeightOnlyConfig") for k in ("Int8", "Float8")},
    "hqq": {"HQQ 4 bits": _hqq},
    "mlx-lm": {"mlx 4 bits": _mlx},
}


def _write(folder: Path, state: State, **config: Any) -> None:
    shutil.copytree(DEMO, folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | config))


def _without(*parts: str) -> Callable[[State], State]:
    return lambda state: {n: x for n, x in state.items() if not any(p in n for p in parts)}


_DAMAGES: dict[str, tuple[Callable[[State], State], dict[str, Any]]] = {
    "sound": (lambda s: s, {}),
    "a matrix missing": (_without(_DOWN), {}),
    "a norm missing": (_without("layers.2.input_layernorm"), {}),
    "the embedding missing": (_without("embed_tokens"), {}),
    "a layer missing": (_without(".layers.1."), {}),
    "a head missing": (lambda s: s, {"tie_word_embeddings": False}),
    "a matrix renamed": (lambda s: {n.replace("0.mlp.down_proj", "0.mlp.w2"): x for n, x in s.items()}, {}),
    "norms renamed in all layers": (lambda s: {n.replace("input_layernorm", "ln_1"): x for n, x in s.items()}, {}),
    "a tensor more in a layer": (lambda s: s | {_DOWN.replace("down", "side"): s[_DOWN].clone()}, {}),
    "fewer layers in config.json": (lambda s: s, {"num_hidden_layers": 3}),
    "a matrix of another shape": (lambda s: s | {_DOWN: s[_DOWN][:, :-1].contiguous()}, {}),
    "another width in config.json": (lambda s: s, {"intermediate_size": 512}),
    "an unused head more": (lambda s: s | {"mtp.proj.weight": s[_DOWN].clone()}, {}),
}
_COMMANDS: dict[str, Sequence[str]] = {
    "inspect": ("inspect", "{0}"),
    "inspect --strict": ("inspect", "{0}", "--strict"),
    "inspect --strict --stats": ("inspect", "{0}", "--strict", "--stats", "-q"),
    "convert": ("convert", "{0}", "--format", "e4m3fn", "-q", "-o", "{1}"),
    "convert --verify none": ("convert", "{0}", "--format", "e4m3fn", "--verify", "none", "-q", "-o", "{1}"),
    "advise": ("advise", "{0}", "--for", "infer", "--budget", "minutes=0.1", "-q", "-o", "{1}"),
    "probe": ("probe", "{0}", "--steps", "1", "--batch-size", "1", "--seq-len", "16", "-q", "-o", "{1}"),
    "finetune": ("finetune", "{0}", "--recipe", "amp-bf16", "--steps", "1", "--batch-size", "1", "--seq-len", "16",
                 "--twin", "none", "-q", "-o", "{1}"),
    "bench": ("bench", "{0}", "--format", "fp16", "--min-iters", "1", "--min-time", "0", "--rounds", "1",
              "--launches", "1", "--batch", "1", "--seq", "16", "-q", "-o", "{1}"),
    "export": ("export", "onnx", "{0}", "-q", "-o", "{1}"),
    "verify --against": ("verify", "{0}", "--against", str(DEMO), "-q"),
    "restore": ("restore", "{0}", "-q", "-o", "{1}"),
    "lpconv.load": ("load", "{0}"),
}  # fmt: skip


def run(work: Path) -> dict[str, Any]:
    """The table of files by commands."""
    import torch
    import transformers  # noqa: F401  # once, for all forks

    import lpconv.models.empty  # noqa: F401

    torch.set_num_threads(1)  # a fork waits for ever for threads that only its parent has
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(p for p in work.iterdir() if p.is_dir())
        for name, (change, config) in _DAMAGES.items():
            _write(Path(folder, name), change(load_file(DEMO / "model.safetensors")), **config)
        planted = [Path(folder, name) for name in _DAMAGES]
        rows = {
            path.name: {name: _done(words, path) for name, words in _COMMANDS.items()} for path in (*planted, *files)
        }
    codes = {name: {command: done["exit"] for command, done in row.items()} for name, row in rows.items()}
    said = {name: row["convert"].get("said", "") for name, row in rows.items()}
    tools = json.loads((work / "versions.json").read_text())
    return {"tools": tools, "summary": _summary(rows), "convert says": said, "exit codes": codes}


def _done(words: Sequence[str], path: Path) -> dict[str, Any]:
    """How a command ended in a process of its own: exit code, whether it published, what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "out"), Path(folder, "log")
        child = os.fork()
        if not child:
            _child([w.format(path, output) for w in words], log)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = log.read_text(errors="replace")
        said = next((line for line in text.splitlines() if line.startswith("error:")), "")
        found: dict[str, Any] = {"exit": code, "published": output.exists()}
        if words[0] == "inspect" and code == 0:
            found["judged"] = "not judged" not in text.lower()
        return found | ({"said": said.replace(str(path), "PATH")[:200]} if said else {})


def _child(words: Sequence[str], log: Path) -> None:
    status = 1
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        if words[0] == "load":
            _load(words[1])
            status = 0
        else:
            from lpconv.cli.main import app

            app(list(words))
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:  # of transformers, by `lpconv.load`; a fork must not go on as its parent
        print(f"error: {e}", flush=True)
    os._exit(status)


def _load(path: str) -> None:
    from lpconv.errors import LpconvError
    from lpconv.models.load import load

    try:
        load(path)
    except LpconvError as e:
        print(f"error: {e.message}", flush=True)
        raise SystemExit(e.exit_code) from e


def _summary(rows: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    sound = {"sound", "an unused head more"}
    odd = {name: row for name, row in rows.items() if name not in sound}
    writing = [n for n, words in _COMMANDS.items() if "{1}" in words]
    return {
        "files": len(odd),
        "runs": sum(map(len, odd.values())),
        "published": sum(row[n]["published"] for row in odd.values() for n in writing),
        "found sound by inspect": sum(
            row[n]["exit"] == 0 and row[n].get("judged", True)
            for row in odd.values()
            for n in _COMMANDS
            if "inspect" in n
        ),
    }


def main() -> None:
    """Run from the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("--work", type=Path, required=True)
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.what == "make":
        make(asked.work)
        return
    found = run(asked.work)
    common.save(found, asked.out)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
