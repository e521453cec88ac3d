"""Outputs damaged on purpose: every component of every form, in a dozen ways.

A `Damage` changes files of a valid output in place; `look` says which checks notice it. First hashes are checked. Then
they are written again, as if the tensors had been damaged before hashing, and weights are checked.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.header import TensorInfo, read_header
from lpconv.verify.options import VerifyOptions
from lpconv.verify.outputs import check_logits
from lpconv.verify.reader import OutputReader, read_output
from lpconv.verify.run import check_hashes, verify_output
from lpconv.verify.written import output_problems
from tests.helpers.checkpoints import rehash
from tests.helpers.models import tiny_model

__all__ = [
    "FORMS_TRIED",
    "Damage",
    "Pair",
    "Seen",
    "damages",
    "edit_json",
    "look",
    "make_outputs",
    "put",
    "seen_in_outputs",
]

_BLOCKS = {"method": "unit", "format": "e4m3fn", "granularity": "128x128"}
_COMPRESSED = {"method": "unit", "layout": "compressed-tensors"}
_MXFP4 = {"method": "unit", "format": "e2m1", "granularity": "mx"}
# The forms by the words of the page, and how to write them; what is kept is a component of all of them.
FORMS_TRIED: dict[str, dict[str, Any]] = {
    "scaled (fp16)": {"method": "unit", "format": "fp16"},
    "scaled (fp32, exact scales)": {"method": "scalify", "format": "fp32", "scale": "exact"},
    "scaled (e4m3fn)": {"method": "unit", "format": "e4m3fn"},
    "tiles (e4m3fn, rows)": {"method": "unit", "format": "e4m3fn", "granularity": "row"},
    "tiles (fp16, rows, exact scales)": {"method": "unit", "format": "fp16", "granularity": "row", "scale": "exact"},
    "points (int4)": {"method": "multipoint", "format": "int4", "budget_bits": 7.0},
    "points (e2m1)": {"method": "multipoint", "format": "e2m1", "budget_bits": 8.0, "points_max": 2},
    "entropy (6 bits)": {"method": "unit", "budget_bits": 6.0},
    "compressed": {**_COMPRESSED, "format": "e4m3fn"},
    "tiles (e2m1, mx)": _MXFP4,
    "tiles (e4m3fn, 128x128)": _BLOCKS,
    "tiles (int4, groups)": {"method": "scalify", "format": "int4", "granularity": "group:16"},
    "compressed tiles (rows)": {**_COMPRESSED, "format": "e4m3fn", "granularity": "row"},
    "compressed tiles (e2m1, mx)": {**_MXFP4, **_COMPRESSED},
    "mlx (e2m1, mx)": {**_MXFP4, "layout": "mlx"},
    "compressed tiles (128x128)": {**_BLOCKS, **_COMPRESSED},
    "compressed tiles (e2m1, nvfp4)": {**_COMPRESSED, "format": "e2m1", "granularity": "nvfp4"},
    "compressed tiles (int4, groups)": {**_COMPRESSED, "format": "int4", "granularity": "group:16"},
    "fine-grained (mx)": {"format": "e4m3fn", "granularity": "mx", "layout": "transformers"},
    "fine-grained (128x128)": {**_BLOCKS, "layout": "transformers"},
    "pair (bf16)": {"method": "collage", "residual": "bf16"},
    "pair (exact16)": {"method": "collage", "residual": "exact16"},
    "pair (int8)": {"method": "collage", "residual": "int8"},
    "pair (fp16)": {"method": "collage", "format": "fp16"},
}
FIRST_OF_KIND = set({form.split(" (")[0]: form for form in reversed(FORMS_TRIED)}.values())
WEIGHT, OTHER, VECTOR = (
    f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm")
)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One change of the files of an output, in place."""

    component: str
    kind: str
    do: Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An output and its source."""

    source: Path
    output: Path


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Whether hashes noticed a damage, and whether weights did after the hashes were written again."""

    damage: Damage
    hashes: bool
    weights: bool


def make_source(directory: Path, seed: int, hidden: int) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": 48, "num_key_value_heads": 4, "vocab_size": 64}
    model = tiny_model("llama", seed=seed, num_hidden_layers=1, **sizes)
    model.model.layers[0].input_layernorm.weight.data += torch.randn(hidden) / 8
    model.save_pretrained(directory)
    return directory


def make_outputs(folder: Path) -> dict[str, Pair]:
    """Source and output of every form, in several files; next to each, an output of another source of these shapes."""
    outputs = {}
    for i, (form, options) in enumerate(FORMS_TRIED.items()):
        hidden = 256 if "128x128" in form else 32  # more than one tile
        sources = [folder / f"source{hidden}-{seed}" for seed in (0, 1)]
        for seed, source in enumerate(sources):
            if not source.exists():
                make_source(source, seed, hidden)
        asked = ConvertOptions(**options, max_shard_size=200 * hidden, verify="weights", workers=1)
        output = folder / f"output{i}"
        assert convert(str(sources[0]), output, asked).verify.passed
        convert(str(sources[1]), output.with_name(f"{output.name}-stale"), asked)
        outputs[form] = Pair(source=sources[0], output=output)
    return outputs


def look(damage: Damage, pair: Pair) -> Seen | None:
    """Damage an output, run the checks and undo the damage; None if the damage changes nothing."""
    output = pair.output
    with _undone(output) as before:
        damage.do(output)
        if _files(output) == before:
            return None
        hashes = bool(check_hashes(output, Silent()).mismatched)
        rehash(output, with_residual=True)
        return Seen(damage=damage, hashes=hashes, weights=_weights_notice(pair))


def seen_in_outputs(damage: Damage, pair: Pair) -> bool:
    """Whether running both models shows a damage after its hashes were written again."""
    with _undone(pair.output):
        damage.do(pair.output)
        rehash(pair.output, with_residual=True)
        with OutputReader.of(read_output(pair.output)) as reader:
            records = list(reader.records.values())
        return bool(output_problems(check_logits(pair.source, pair.output, trust_remote_code=False), records))


def _weights_notice(pair: Pair) -> bool:
    try:
        return not verify_output(
            pair.output, VerifyOptions(against=str(pair.source), level="weights"), progress=Silent()
        ).passed
    except LpconvError:
        return True


@contextlib.contextmanager
def _undone(output: Path) -> Iterator[dict[Path, bytes]]:
    before = _files(output)
    try:
        yield before
    finally:
        after = _files(output)
        for path in after.keys() - before.keys():
            path.unlink()
        for path, data in before.items():
            if after.get(path) != data:
                path.write_bytes(data)


def _files(output: Path) -> dict[Path, bytes]:
    """Every file with its bytes; links to folders are files without any."""
    found = (p for p in output.rglob("*") if p.is_symlink() or p.is_file())
    return {p: p.read_bytes() if p.is_file() else b"" for p in found}


def damages(form: str, output: Path) -> Iterator[Damage]:
    """All damages for an output; those that do not depend on the form only for the first form of a kind."""
    low = {"residual": f"{WEIGHT}"} if (output / "collage").exists() else {}
    packed = _find(output, f"{WEIGHT}_packed") is not None
    parts = {
        "codes": f"{WEIGHT}_packed" if packed else WEIGHT,
        "scales": f"{WEIGHT}_scale_inv" if _find(output, f"{WEIGHT}_scale_inv") is not None else f"{WEIGHT}_scale",
        "counts": f"{WEIGHT}_points",
        "sizes": f"{WEIGHT}_blocks",
        **({"kept": VECTOR} if form in FIRST_OF_KIND else {}),
        **low,
    }
    for component, name in parts.items():
        folder = "collage" if component == "residual" else "."
        if _find(output / folder, name) is not None:
            yield from _of_tensor(component, name, folder)
    yield from _of_files(output)
    if form in FIRST_OF_KIND:
        yield from _of_documents(output)


def _codes(output: Path) -> str:
    """Name of the weight's codes."""
    return WEIGHT if _find(output, WEIGHT) else f"{WEIGHT}_packed"


def _of_tensor(component: str, name: str, folder: str) -> Iterator[Damage]:
    swapped = OTHER + name.removeprefix(WEIGHT) if name.startswith(WEIGHT) else "model.norm.weight"

    def patch(kind: str, change: Callable[[bytearray, TensorInfo], None]) -> Damage:
        def do(output: Path) -> None:
            file, info, data, start = _open(output / folder, name)
            piece = data[start + info.begin : start + info.end]
            change(piece, info)
            data[start + info.begin : start + info.end] = piece
            file.write_bytes(data)

        return Damage(component=component, kind=kind, do=do)

    def fill(byte: int) -> Callable[[bytearray, TensorInfo], None]:
        def change(piece: bytearray, info: TensorInfo) -> None:
            piece[:] = bytes([byte]) * len(piece)

        return change

    def flip(share: float, bit: int) -> Callable[[bytearray, TensorInfo], None]:
        def change(piece: bytearray, info: TensorInfo) -> None:
            piece[int(share * (len(piece) - 1))] ^= 1 << bit

        return change

    def no_number(value: float) -> Callable[[bytearray, TensorInfo], None]:
        def change(piece: bytearray, info: TensorInfo) -> None:
            if info.dtype in _FLOATS:
                bits = torch.tensor([value]).to(_FLOATS[info.dtype]).view(torch.uint8).numpy().tobytes()
                piece[: len(bits)] = bits

        return change

    def exchange(output: Path) -> None:
        a, b = _open(output / folder, name), _open(output / folder, swapped)
        pieces = [data[start + info.begin : start + info.end] for _, info, data, start in (a, b)]
        if a[0] == b[0]:
            b = (b[0], b[1], a[2], b[3])
        for (file, info, data, start), piece in zip((a, b), reversed(pieces), strict=True):
            assert len(piece) == info.num_bytes
            data[start + info.begin : start + info.end] = piece
            file.write_bytes(data)

    def stale(output: Path) -> None:
        theirs = _open(output.with_name(output.name + "-stale") / folder, name)
        piece = theirs[2][theirs[3] + theirs[1].begin : theirs[3] + theirs[1].end]
        file, info, data, start = _open(output / folder, name)
        if len(piece) == info.num_bytes:
            data[start + info.begin : start + info.end] = piece
            file.write_bytes(data)

    yield patch("zeroed", fill(0))
    yield patch("0xFF", fill(0xFF))
    for share, bit in ((0, 0), (0.25, 3), (0.5, 0), (0.75, 6), (1, 7), (1, 0)):
        yield patch("one bit", flip(share, bit))
    yield patch("NaN", no_number(float("nan")))
    yield patch("negative", no_number(-1.0))
    yield Damage(component=component, kind="swapped", do=exchange)
    yield Damage(component=component, kind="of another source", do=stale)


def _of_files(output: Path) -> Iterator[Damage]:
    for file in sorted(output.rglob("*.safetensors")):
        name = file.relative_to(output).as_posix()

        def cut(output: Path, name: str = name) -> None:
            (output / name).write_bytes((output / name).read_bytes()[:-8])

        def other(output: Path, name: str = name) -> None:
            (output / name).write_bytes((output.with_name(output.name + "-stale") / name).read_bytes())

        yield Damage(component="files", kind="truncated", do=cut)
        yield Damage(component="files", kind="of another source", do=other)


def edit_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change a JSON document of an output, if it has one."""

    def do(output: Path) -> None:
        if not (output / name).exists():
            return
        document = json.loads((output / name).read_text())
        before = json.dumps(document)
        change(document)
        if json.dumps(document) != before:  # other spaces are no damage
            (output / name).write_text(json.dumps(document))

    return do


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Set one value of a JSON document."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def _of_documents(output: Path) -> Iterator[Damage]:
    def edit(component: str, kind: str, name: str, change: Callable[[Any], object]) -> Damage:
        return Damage(component=component, kind=kind, do=edit_json(name, change))

    config = json.loads((output / "config.json").read_text())
    for key, value in (("hidden_act", "gelu"), ("rms_norm_eps", 1.0), ("vocab_size", 65), ("model_type", "mistral")):
        yield edit("config", "value", "config.json", put(key, value=value))
    yield edit("config", "value", "config.json", put("dtype", value="float64"))
    for key in config.get("quantization_config", {}):
        yield edit("config", "value", "config.json", put("quantization_config", key, value="e5m2"))
    for key in ("quantization_config", "model_type", "tie_word_embeddings"):
        yield edit("config", "key taken away", "config.json", functools.partial(_drop, key))
    index = "model.safetensors.index.json"
    files = sorted(set(json.loads((output / index).read_text())["weight_map"].values()))
    yield edit("index", "value", index, put("weight_map", _codes(output), value=files[-1]))
    yield edit("index", "value", index, put("metadata", "total_size", value=1))
    yield edit("index", "key taken away", index, lambda d: d["weight_map"].pop(_codes(output)))
    yield edit("index", "key added", index, put("weight_map", "more.weight", value=files[0]))
    tensors = json.loads((output / "lpconv.json").read_text())["tensors"]
    at = next(i for i, t in enumerate(tensors) if t["name"] == WEIGHT)
    new: dict[str, Any] = {"scale": 1e6, "sqnr_db": 12.5, "max_rel_error": 0.0123, "rms": 7.0, "absmax": 7.0,
           "format": "e5m2", "action": "keep", "source_dtype": "BF16", "num_nan": 3}  # fmt: skip
    for key, changed in new.items():
        yield edit("record", "value", "lpconv.json", put("tensors", at, key, value=changed))
    for key in ("method", "format", "residual"):
        yield edit("record", "value", "lpconv.json", put(key, value="bf17"))
    yield edit("record", "value", "lpconv.json", put("source_config", value={"vocab_size": 3}))
    yield edit("record", "value", "lpconv.json", put("options", "scale", value="more"))
    yield edit("record", "key taken away", "lpconv.json", lambda d: d["tensors"].pop(at))

    tied = {"action": "tie", "tied_to": OTHER}
    yield edit("record", "value", "lpconv.json", lambda d: d["tensors"][at].update(tied))


def _drop(key: str, document: dict[str, Any]) -> None:
    document.pop(key, None)


def _find(folder: Path, name: str) -> Path | None:
    return next((f for f in sorted(folder.glob("*.safetensors")) if name in read_header(f).tensors), None)


def _open(folder: Path, name: str) -> tuple[Path, TensorInfo, bytearray, int]:
    """The file of a tensor, its entry in the header, all bytes of the file, and the offset of the data."""
    file = _find(folder, name)
    assert file is not None, name
    header = read_header(file)
    return file, header.tensors[name], bytearray(file.read_bytes()), header.data_start
