"""Differences between a source and its output, planted in every layout: in weights, files, configs, records and more.

Somebody who changes an output and signs it again could leave them. A `Damage` (damage.py) makes one, and `look` tells
which levels notice it. If a difference does not apply to a layout, it changes nothing.
"""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.data import demo_text
from lpconv.forms.coded import digest_of
from lpconv.plan.options import ConvertOptions
from tests.faults.damage import Damage, Pair, edit_json, put
from tests.helpers.checkpoints import bits_of, keep_layers
from tests.helpers.gguf_files import demo_with_merges

__all__ = ["LAYOUTS", "differences", "make_layouts"]

Tensors = dict[str, Tensor]
LAYOUTS: dict[str, dict[str, Any]] = {
    "lpconv": {"format": "e4m3fn", "granularity": "row"},
    "lpconv, gptq": {"method": "unit", "format": "int4", "granularity": "group:32", "rounding": "gptq"},
    "compressed-tensors": {"format": "e4m3fn", "layout": "compressed-tensors", "kv_cache": "fp8", "input_scales": True},
    "mlx": {"format": "e2m1", "granularity": "mx", "layout": "mlx"},
    "fine-grained fp8": {"format": "e4m3fn", "granularity": "128x128", "layout": "transformers"},
    "collage": {"method": "collage"},
    "gguf": {"format": "int8", "granularity": "group:32", "layout": "gguf"},
}  # fmt: skip
DOWN, GATE, UP = (f"model.layers.0.mlp.{n}_proj.weight" for n in ("down", "gate", "up"))
NORM, EMBEDDING = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"
WEIGHTS, MARKER = "model.safetensors", "lpconv.json"


def make_layouts(folder: Path) -> dict[str, Pair]:
    """A model of one layer with all kinds of side files, and its outputs in all layouts."""
    source = demo_with_merges(folder / "source")
    keep_layers(source, 1)
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    )
    (folder / "text.txt").write_text(demo_text("train").read_text()[:400])
    outputs = {}
    for layout, options in LAYOUTS.items():
        output = folder / layout.replace(", ", "-")
        has_text = "rounding" in options or "kv_cache" in options
        text = str(folder / "text.txt") if has_text else None
        asked = ConvertOptions(verify="weights", workers=1, calibrate=text, **options)
        assert convert(str(source), output, asked).verify.passed
        outputs[layout] = Pair(source=source, output=output)
    return outputs


def differences() -> Iterator[Damage]:
    """All planted differences."""
    for component, several in _DIFFERENCES.items():
        for kind, do in several.items():
            yield Damage(component=component, kind=kind, do=do)


def _put(name: str, *path: Any, value: Any) -> Callable[[Path], None]:
    return edit_json(name, put(*path, value=value))


def _tensors(change: Callable[[Tensors], object], metadata: str = "pt") -> Callable[[Path], None]:
    """Rewrite `model.safetensors`; GGUF files have no tensors of these names."""

    def do(output: Path) -> None:
        if (output / WEIGHTS).exists():
            tensors = load_file(output / WEIGHTS)
            before = {n: (x.dtype, bits_of(x)) for n, x in tensors.items()}
            change(tensors)
            if metadata != "pt" or before != {n: (x.dtype, bits_of(x)) for n, x in tensors.items()}:
                written = {n: x.contiguous() for n, x in tensors.items()}
                save_file(written, output / WEIGHTS, metadata={"format": metadata})

    return do


def _bytes(name: str, change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    """Change the stored data of a tensor, also in a GGUF file; packed codes have their own names."""

    def do(output: Path) -> None:
        if (output / "model.gguf").exists():
            place = json.loads((output / "config.json").read_text())["quantization_config"]["tensors"][name]
            data = bytearray((output / "model.gguf").read_bytes())
            piece = data[place["begin"] : place["end"]]
            change(piece)
            data[place["begin"] : place["end"]] = piece
            (output / "model.gguf").write_bytes(data)
            return
        tensors = load_file(output / WEIGHTS)
        own = name if name in tensors else f"{name}_packed"
        raw = tensors[own].reshape(-1).view(torch.uint8)
        piece = bytearray(raw.numpy().tobytes())
        change(piece)
        raw.copy_(torch.tensor(list(piece), dtype=torch.uint8))
        save_file(tensors, output / WEIGHTS, metadata={"format": "pt"})

    return do


def _zero(piece: bytearray) -> None:
    piece[:] = bytes(len(piece))


def _flip(piece: bytearray) -> None:
    piece[len(piece) // 2] ^= 1


def _roll(piece: bytearray) -> None:
    piece[:] = piece[len(piece) // 2 :] + piece[: len(piece) // 2]


def _rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def _swap(a: str, b: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(a)]:
            other = b + name.removeprefix(a)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def _drop(start: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(start)]


def _times(end: str, factor: float) -> Callable[[Tensors], None]:
    """Multiply all tensors whose names end with `end`."""

    def change(tensors: Tensors) -> None:
        for name, x in tensors.items():
            if name.endswith(end) and x.dtype.is_floating_point:
                tensors[name] = (x.float() * factor).to(x.dtype)

    return change


def _as_integers(tensors: Tensors) -> None:
    tensors |= {n: x.view(torch.int8) for n, x in tensors.items() if x.itemsize == 1}


def _write(name: str, text: str = "x") -> Callable[[Path], None]:
    def do(output: Path) -> None:
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(text)

    return do


def _delete(name: str) -> Callable[[Path], None]:
    return lambda output: (output / name).unlink(missing_ok=True)


def _adapter(output: Path) -> None:
    settings = {"peft_type": "LORA", "target_modules": ["down_proj"], "base_model_name_or_path": "."}
    (output / "adapter_config.json").write_text(json.dumps(settings))
    part = DOWN.removesuffix(".weight")
    adapter = {f"base_model.model.{part}.lora_{k}.weight": torch.ones(1, 1) for k in "AB"}
    save_file(adapter, output / "adapter_model.safetensors")


def _shards(output: Path) -> None:
    """Add an index to weights that differ from those of `model.safetensors`."""
    if (output / WEIGHTS).exists():
        tensors = load_file(output / WEIGHTS)
        other = {n: x.flip(0).contiguous() for n, x in tensors.items()}
        save_file(other, output / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
        (output / "model.safetensors.index.json").write_text(json.dumps(index))


def _header(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def do(output: Path) -> None:
        if (output / "model.gguf").exists():
            data = bytearray((output / "model.gguf").read_bytes())
            change(data)
            (output / "model.gguf").write_bytes(data)

    return do


def _exchange(a: bytes, b: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        at, other = data.index(a), data.index(b)
        data[at : at + len(a)], data[other : other + len(b)] = b, a

    return change


def _field(key: str, value: float) -> Callable[[Path], None]:
    """Replace a number in the header of a GGUF file."""

    def do(output: Path) -> None:
        if (output / "model.gguf").exists():
            reader = gguf.GGUFReader(output / "model.gguf", "r+")
            reader.fields[key].parts[-1][0] = value
            reader.data.flush()

    return do


def _forged(options: dict[str, Any], record: dict[str, Any], *, tuned: bool = False) -> Callable[[Path], None]:
    """Set codes to zero, and add a record that says that they were chosen so."""

    def do(output: Path) -> None:
        if not (output / WEIGHTS).exists() or (output / "collage").exists():
            return
        tensors = load_file(output / WEIGHTS)
        own = DOWN if DOWN in tensors else f"{DOWN}_packed"
        tensors[own].view(torch.uint8).fill_(0x88 if tensors[own].dtype == torch.int32 else 0)
        save_file(tensors, output / WEIGHTS, metadata={"format": "pt"})
        module = DOWN.removesuffix(".weight")
        parts = {n: x for n, x in tensors.items() if n.startswith(module) and "input_scale" not in n}
        document = json.loads((output / MARKER).read_text())
        entry = _entry(document)
        entry["rounding"] = {"max_steps": 1e9, "sha256": digest_of(parts), "output_error": None, **record}
        entry |= {"sqnr_db": 0.0, "max_rel_error": 1.0}
        document["options"] |= options
        if options:
            text = {"text": "gone.txt", "sha256": "0" * 64, "num_tokens": 8, "seq_len": 8}
            document["calibration"] = {"absmax": {}, **(document.get("calibration") or {}), **text}
        (output / MARKER).write_text(json.dumps(document))
        if tuned:
            (output / "finetune.json").write_text(json.dumps({"arithmetic": {"on_codes": True}}))

    return do


def _entry(document: Any) -> dict[str, Any]:
    """The record of one weight."""
    return next(t for t in document["tensors"] if t["name"] == DOWN)


def _record(**changed: Any) -> Callable[[Path], None]:
    return edit_json(MARKER, lambda document: _entry(document).update(changed))


def _rounding(**changed: Any) -> Callable[[Path], None]:
    return edit_json(MARKER, lambda document: (_entry(document).get("rounding") or {}).update(changed))


def _inputs(*ends: str) -> Callable[[Path], None]:
    """Make scales of inputs, keys or values 16 times too large, in the file and the record."""

    def do(output: Path) -> None:
        document = json.loads((output / MARKER).read_text())
        absmax = (document.get("calibration") or {}).get("absmax") or {}
        names = [n for n in absmax if n.endswith(ends)]
        if not names:
            return
        document["calibration"]["absmax"] |= {n: 16 * absmax[n] for n in names}
        (output / MARKER).write_text(json.dumps(document))
        stored = [n if n.endswith("_scale") else f"{n}.input_scale" for n in names]
        _tensors(lambda tensors: [tensors[n].mul_(16) for n in stored])(output)

    return do


def _larger_inputs(document: Any) -> None:
    absmax = (document.get("calibration") or {}).get("absmax") or {}
    absmax |= {name: 16 * value for name, value in absmax.items()}


def _swap_tokens(document: Any) -> None:
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


_config, _settings = functools.partial(_put, "config.json"), functools.partial(_put, "tokenizer_config.json")
_DIFFERENCES: dict[str, dict[str, Callable[[Path], None]]] = {
    "weights": {
        "codes of zero": _bytes(DOWN, _zero),
        "one bit": _bytes(DOWN, _flip),
        "halves exchanged": _bytes(DOWN, _roll),
        "a norm of zero": _bytes(NORM, _zero),
        "one bit of a norm": _bytes(NORM, _flip),
        "one bit of the embedding": _bytes(EMBEDDING, _flip),
    },
    "scales": {
        "16 times larger": _tensors(_times("_scale", 16.0)),
        "16 times larger, in blocks": _tensors(_times("_scale_inv", 16.0)),
        "scales of inputs, also in the record": _inputs("_proj"),
        "scales of keys, also in the record": _inputs("k_scale"),
        "scales of values, also in the record": _inputs("v_scale"),
        "gone": _tensors(lambda t: [t.pop(n) for n in list(t) if n.endswith(("_scale", "_scale_inv", ".scales"))]),
    },
    "names": {
        "a tensor gone": _tensors(_drop(DOWN.removesuffix(".weight"))),
        "a norm gone": _tensors(_drop(NORM)),
        "a tensor renamed": _tensors(_rename(DOWN.removesuffix(".weight"), "model.layers.0.mlp.w2")),
        "two exchanged": _tensors(_swap(GATE.removesuffix(".weight"), UP.removesuffix(".weight"))),
        "one more": _tensors(lambda t: t.update({"model.layers.1.input_layernorm.weight": torch.ones(128)})),
        "a bias more": _tensors(lambda t: t.update({DOWN.replace("weight", "bias"): torch.ones(128)})),
    },
    "dtypes": {
        "a norm in bf16": _tensors(lambda t: t.update({NORM: t[NORM].bfloat16()})),
        "a norm in fp64": _tensors(lambda t: t.update({NORM: t[NORM].double()})),
        "codes as integers": _tensors(_as_integers),
        "config": _config("dtype", value="float64"),
    },
    "ties": {
        "another head": _tensors(lambda t: t.update({"lm_head.weight": torch.ones(256, 128)})),
        "untied in the config": _config("tie_word_embeddings", value=False),
        "tied in the record": _record(action="tie", tied_to=UP),
    },
    "files": {
        "pytorch_model.bin": _write("pytorch_model.bin"),
        "an index to other weights": _shards,
        "model-extra.gguf": _write("model-extra.gguf"),
        "model.onnx": _write("onnx/model.onnx"),
        "tf_model.h5": _write("tf_model.h5"),
        "flax_model.msgpack": _write("flax_model.msgpack"),
        "generate.py": _write("custom_generate/generate.py"),
        "modeling.py": _write("modeling_llama.py"),
        "compiled code": _write("__pycache__/lpconv_loader.cpython-311.pyc"),
        "preprocessor_config.json": _write("preprocessor_config.json", "{}"),
        "modules.json": _write("modules.json", "[]"),
        "quantize_config.json": _write("quantize_config.json", '{"bits": 4}'),
        "generation_config.json gone": _delete("generation_config.json"),
        "metrics.json gone": _delete("metrics.json"),
    },
    "adapters": {
        "LoRA": _adapter,
        "weights alone": _write("adapter_model.bin"),
        "config alone": _write("adapter_config.json", '{"peft_type": "LORA"}'),
    },
    "config": {
        "activation": _config("hidden_act", value="gelu"),
        "epsilon": _config("rms_norm_eps", value=0.5),
        "heads": _config("num_attention_heads", value=1),
        "class": _config("architectures", value=["MistralForCausalLM"]),
        "model type": _config("model_type", value="mistral"),
        "code": _config("auto_map", value={"AutoModelForCausalLM": "modeling_llama.Model"}),
        "rotary base": _config("rope_theta", value=5e5),
        "layers": _config("num_hidden_layers", value=2),
        "window": _config("sliding_window", value=4),
        "nothing quantised": edit_json("config.json", lambda d: d.pop("quantization_config", None)),
        "end of text": _put("generation_config.json", "eos_token_id", value=3),
        "sampling": _put("generation_config.json", "repetition_penalty", value=1.5),
    },
    "tokenizer": {
        "ids exchanged": edit_json("tokenizer.json", _swap_tokens),
        "a merge gone": edit_json("tokenizer.json", lambda d: d["model"]["merges"].clear()),
        "a step more": edit_json("tokenizer.json", lambda d: d.update(normalizer={"type": "Lowercase"})),
        "padding": _settings("padding_side", value="left"),
        "unknown token": _settings("unk_token", value="a"),
        "template": _write("chat_template.jinja", "{{ messages }}"),
        "template gone": _delete("chat_template.jinja"),
        "a second template": _write("additional_chat_templates/tools.jinja"),
        "vocabulary gone": _delete("tokenizer.json"),
        "settings gone": _delete("tokenizer_config.json"),
        "of another kind": _write("tokenizer.model"),
        "tokens more": _write("added_tokens.json", '{"x": 9}'),
    },
    "headers": {
        "written for TensorFlow": _tensors(lambda t: None, metadata="tf"),
        "epsilon": _field("llama.attention.layer_norm_rms_epsilon", 0.5),
        "heads": _field("llama.attention.head_count_kv", 1),
        "rotary base": _field("llama.rope.freq_base", 5e5),
        "start of text": _field("tokenizer.ggml.bos_token_id", 5),
        "keys and values exchanged": _header(_exchange(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight")),
        "a token renamed": _header(_exchange(b"\x01\0\0\0\0\0\0\0a", b"\x01\0\0\0\0\0\0\0b")),
    },
    "record": {
        "codes chosen": _forged({}, {}),
        "codes chosen by error feedback": _forged(
            {"rounding": "gptq", "calibrate": "gone.txt"},
            {"output_error": 0.01, "nearest_error": 0.02, "num_inputs": 64},
        ),
        "codes trained": _forged({}, {}, tuned=True),
        "largest distance": _rounding(max_steps=1e9),
        "no output error": _rounding(output_error=None),
        "hash of the codes": _rounding(sha256="0" * 64),
        "ratio": _record(sqnr_db=99.0),
        "largest error": _record(max_rel_error=0.0123),
        "reason": _record(action="keep", format="bf16"),
        "largest inputs": edit_json(MARKER, _larger_inputs),
        "settings": _put(MARKER, "options", "granularity", value="group:64"),
        "method": _put(MARKER, "method", value="scalify"),
        "config of the source": _put(MARKER, "source_config", value={"vocab_size": 3}),
        "a tensor gone": edit_json(MARKER, lambda d: d["tensors"].pop(0)),
    },
}  # fmt: skip
