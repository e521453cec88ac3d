"""The layouts of others, decoded: bit for bit what their own packages make of the same files.

Theirs give bf16 or the dtype of the scales; ours is fp32, so ours rounded to theirs must be theirs. What no package
here decodes is done again number by number, by the words of its documentation.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms import grid_of
from lpconv.layouts.reader import StoredTensors, open_values
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.source import SafetensorsSource, read_range
from tests.helpers.foreign_files import AWQ_ORDER, MAKERS, Tensors, gpt_oss, scheme_of

NAME = "layer.q_proj.weight"


def edges(rows: int = 264, cols: int = 192, seed: int = 0) -> Tensor:
    """Rows of many sizes: zeros, both signs of zero, one large number, ties between codes, the limit of a format."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-6, 1, rows).unsqueeze(1)
    x[3], x[4, ::2], x[5, 7], x[6] = 0.0, -0.0, 1000.0, torch.linspace(-6, 6, cols)
    x[7] = torch.tensor([448.0, 0.5, 0.25, -1.25, 2.5, -3.5, 5.0, 1.75]).repeat(cols // 8)
    return x


def store(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def decoded(folder: Path, name: str = NAME) -> Tensor:
    with StoredTensors.open(folder) as stored:
        assert not stored.forms[name].is_kept
        return stored.tensor(name)


def written(layout: str, folder: Path, w: Tensor) -> Tensors:
    make, config = MAKERS[layout]
    tensors = make(NAME, w, float(w.abs().max()))
    store(folder, tensors, config())
    return tensors


COMPRESSED = {"ct FP8": "FP8", "ct FP8_DYNAMIC": "FP8_DYNAMIC", "ct FP8_BLOCK": "FP8_BLOCK", "ct W8A8": "W8A8",
              "ct MXFP8": "MXFP8", "ct MXFP4": "MXFP4", "ct NVFP4": "NVFP4A16", "ct W4A16": "W4A16",
              "ct W4A16_ASYM": "W4A16_ASYM", "ct W3A16_ASYM": "W4A16_ASYM", "ct W8A16": "W8A16"}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [n for n in COMPRESSED if n != "ct FP8"])  # one scale: our own form
def test_compressed_tensors_decodes_the_same(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor

    config = MAKERS[layout][1]()
    tensors = written(layout, tmp_path, edges().to(dtype))
    weights = config["config_groups"]["group_0"]["weights"]
    scheme = scheme_of(COMPRESSED[layout], group_size=weights["group_size"], num_bits=weights["num_bits"])
    state = {n.rpartition(".")[2]: x for n, x in tensors.items()}
    theirs = BaseCompressor.get_value_from_registry(config["format"]).decompress(state, scheme)["weight"]
    assert torch.equal(decoded(tmp_path).to(theirs.dtype), theirs)


_MORE = {"symmetric": True, "dynamic": False}
_SECOND: dict[str, tuple[str, dict[str, Any], Tensor, Tensor]] = {
    "blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        torch.ones(100, 100), torch.tensor([[0.5, 2.0], [3.0, 5.0]]),
    ),
    "groups": (
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 96},
        torch.ones(4, 288), torch.arange(1.0, 13).view(4, 3),
    ),
    "rows": (
        "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
        torch.ones(4, 64), torch.arange(1.0, 5).view(4, 1),
    ),
    "one word": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4},
        torch.ones(4, 4) / 30, torch.arange(1.0, 5).view(4, 1),
    ),
}  # fmt: skip
_FIRST: dict[str, dict[str, Any]] = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "channel"},
}


@pytest.mark.parametrize("kind", _SECOND)
@pytest.mark.parametrize(
    ("first", "second"),
    [("Linear", "layer.q_proj"), ("Linear", "re:.*q_proj"), ("re:.*q_proj", "layer.q_proj"), ("re:q_proj", "Linear"),
     ("re:layer", "re:.*_proj")],
)  # fmt: skip
def test_a_second_group_of_the_config_has_its_own_tiles(kind: str, first: str, second: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils import match_targets

    assert match_targets("layer.q_proj", torch.nn.Linear(1, 1), [first, second])[0] == second
    layout, weights, w, scales = _SECOND[kind]
    other = _FIRST.get(layout, _FIRST["float-quantized"]) | ({"num_bits": 8} if kind == "one word" else {})
    groups = [{"targets": [t], "weights": {**x, **_MORE}} for t, x in ((first, other), (second, weights))]
    compressor = BaseCompressor.get_value_from_registry(layout)
    scheme = QuantizationScheme(targets=["Linear"], weights=groups[1]["weights"])
    state = compressor.compress({"weight": w * 30, "weight_scale": scales}, scheme)
    config = {"quant_method": "compressed-tensors", "config_groups": {"0": groups[0], "1": groups[1]}}
    store(tmp_path, {"layer.q_proj." + n: x for n, x in state.items()}, config)
    assert torch.equal(decoded(tmp_path), compressor.decompress(state, scheme)["weight"])


@pytest.mark.parametrize("layout", ["fp8", "fp8 bf16", "fp8 ue8m0", "mxfp8"])
def test_transformers_decodes_the_same_fp8(layout: str, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = written(layout, tmp_path, edges(rows=256, cols=384))
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Fp8Dequantize(None)._dequantize_one(tensors[NAME], tensors[NAME + "_scale_inv"], dtype)
        assert torch.equal(decoded(tmp_path).to(dtype), theirs)


def test_transformers_decodes_the_same_experts(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = gpt_oss("experts.down_proj", torch.stack([edges(96, 200), edges(96, 200, seed=1)]))
    store(tmp_path, tensors, {"quant_method": "mxfp4"})
    theirs = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32)
    assert torch.equal(decoded(tmp_path, "experts.down_proj"), theirs)


def test_torchao_decodes_the_same_nvfp4(tmp_path: Path) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    tensors = written("modelopt NVFP4", tmp_path, edges())
    theirs = NVFP4Tensor(
        tensors[NAME], tensors[NAME + "_scale"], 16, torch.float32, tensors[NAME + "_scale_2"]
    ).dequantize()
    assert torch.equal(decoded(tmp_path), theirs)


def test_modelopt_has_two_numbers_of_a_group_in_a_byte(tmp_path: Path) -> None:
    """As compressed-tensors' MXFP4, by other names."""
    from compressed_tensors.compressors.base import BaseCompressor

    tensors = written("modelopt MXFP4", tmp_path, edges())
    state = {"weight_packed": tensors[NAME], "weight_scale": tensors[NAME + "_scale"]}
    kind = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    theirs = kind.decompress(state, scheme_of("MXFP4"))["weight"]
    assert torch.equal(decoded(tmp_path).to(theirs.dtype), theirs)


@pytest.mark.parametrize(("layout", "rows", "cols"), [("modelopt FP8 blocks", 128, 128), ("modelopt INT8", 1, 512)])
def test_modelopt_has_a_scale_for_a_block_or_a_row(layout: str, rows: int, cols: int, tmp_path: Path) -> None:
    tensors = written(layout, tmp_path, edges(256, 512))
    scales = tensors[NAME + "_scale"].reshape(256 // rows, 512 // cols)
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    assert torch.equal(decoded(tmp_path), tensors[NAME].float() * wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [(0, 64), (64, 192), (0, 256)], ids=str)
def test_rows_of_blocks_decode_into_any_dtype(rows: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    codes, scales = edges(256, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    tensors = {NAME: codes, NAME + "_scale_inv": scales.to(torch.float8_e8m0fnu)}
    store(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    start, stop = (256 * n for n in rows)
    out = torch.empty(stop - start, dtype=dtype)
    with StoredTensors.open(tmp_path) as stored:
        data, side = stored.read_data(NAME, start, stop), stored.side(NAME)
        stored.forms[NAME].decode_to(out, data, start, stop, side)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(out.view(-1, 256), (codes.float() * wide)[slice(*rows)].to(dtype))


@pytest.mark.parametrize("second", [{}, {"weight_scale_2": torch.tensor(0.003)}], ids=["W4A16", "W4A8"])
def test_modelopt_has_two_rows_of_integers_in_a_byte(second: Tensors, tmp_path: Path) -> None:
    """Every byte, and a column's factor after the scale. The second scale, of products in fp8, changes nothing."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(4, 1)
    scales = torch.rand(8, 2, generator=torch.Generator().manual_seed(0)) + 1e-3
    columns = (torch.rand(256, generator=torch.Generator().manual_seed(1)) * 9 + 0.1).bfloat16()
    named = {"weight": codes, "weight_scale": scales, "pre_quant_scale": columns, **second}
    tensors = {NAME.removesuffix("weight") + n: x for n, x in named.items()}
    store(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ" if second else "W4A16_AWQ"})
    got = decoded(tmp_path)
    for n in range(8):
        for k in range(256):
            nibble = int(codes[n // 2, k]) >> 4 * (n % 2) & 15
            wanted = (nibble - 16 * (nibble > 7)) * scales[n, k // 128] * columns[k].float()
            assert float(got[n, k]) == float(wanted), (n, k)


def test_a_factor_of_inputs_is_one_of_the_weight(tmp_path: Path) -> None:
    """NVFP4 whose inputs readers multiply: what they compute is what the decoded weight does."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    tensors = written("modelopt NVFP4_AWQ", tmp_path, edges(256, 512))
    codes, scales, second = tensors[NAME], tensors[NAME + "_scale"], tensors[NAME + "_scale_2"]
    columns = tensors[NAME.removesuffix("weight") + "pre_quant_scale"].float()
    theirs = NVFP4Tensor(codes, scales, 16, torch.float32, second).dequantize()
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    got = decoded(tmp_path)
    assert torch.equal(got, theirs * columns)
    assert torch.allclose(x @ got.t(), (x * columns) @ theirs.t(), rtol=1e-5)


_REFUSED: dict[str, tuple[str, Tensors, str]] = {
    "two numbers of a row in a byte": ("W4A16_AWQ", {"weight_scale": torch.ones(128, 4)}, NAME),
    "no scales": ("W4A16_AWQ", {}, NAME),
    "scales of another matrix": ("W4A16_AWQ", {"weight_scale": torch.ones(256, 5)}, NAME),
    "factors of other columns": (
        "W4A16_AWQ",
        {"weight_scale": torch.ones(256, 4), "pre_quant_scale": torch.ones(256)},
        NAME,
    ),
    "no scale of products": ("W4A8_AWQ", {"weight_scale": torch.ones(256, 4)}, NAME),
    "factors of a plain weight": (
        "W4A16_AWQ",
        {"weight": torch.ones(8, 512), "pre_quant_scale": torch.ones(512)},
        "pre_quant_scale",
    ),
    "a part as two thin matrices": (
        "W4A16_AWQ",
        {"weight_scale": torch.ones(256, 4), "svdquant_lora_a": torch.ones(2, 512)},
        NAME,
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_modelopts_integers_lack_is_refused(what: str, tmp_path: Path) -> None:
    algorithm, parts, named = _REFUSED[what]
    parts = {"weight": torch.zeros(128, 512, dtype=torch.uint8), **parts}
    tensors = {NAME.removesuffix("weight") + n: x for n, x in parts.items()}
    store(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": algorithm})
    with pytest.raises(InputError, match=named):
        StoredTensors.open(tmp_path)


def test_modelopts_thin_matrices_are_refused_by_name(tmp_path: Path) -> None:
    store(tmp_path, {NAME: torch.ones(2, 2)}, {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"})
    with pytest.raises(UnsupportedError, match="NVFP4_SVD"):
        StoredTensors.open(tmp_path)


def _gptq_number(t: Tensors, n: int, k: int, bits: int, *, first_version: bool) -> float:
    stem, group = "layer.q_proj.", int(t["layer.q_proj.g_idx"][k])
    code = int.from_bytes(t[stem + "qweight"][:, n].numpy().tobytes(), "little") >> bits * k & 2**bits - 1
    zero = int.from_bytes(t[stem + "qzeros"][group].numpy().tobytes(), "little") >> bits * n & 2**bits - 1
    return (code - (zero + first_version) % 2**bits) * float(t[stem + "scales"][group, n])


def _awq_number(t: Tensors, n: int, k: int) -> float:
    stem, place, group = "layer.q_proj.", 4 * AWQ_ORDER.index(n % 8), k // 32
    code = int(t[stem + "qweight"][k, n // 8]) >> place & 15
    zero = int(t[stem + "qzeros"][group, n // 8]) >> place & 15
    return (code - zero) * float(t[stem + "scales"][group, n])


@pytest.mark.parametrize("layout", ["gptq", "gptq 3", "gptq desc_act", "awq"])
def test_integers_on_their_side_are_what_their_documentation_says(layout: str, tmp_path: Path) -> None:
    tensors, got = written(layout, tmp_path, edges(264, 64)), decoded(tmp_path)
    assert got.shape == (264, 64)
    for n in range(0, 264, 3):
        for k in range(64):
            is_awq = layout == "awq"
            first, bits = layout != "gptq desc_act", 3 if layout == "gptq 3" else 4
            wanted = _awq_number(tensors, n, k) if is_awq else _gptq_number(tensors, n, k, bits, first_version=first)
            assert float(got[n, k]) == float(torch.tensor(wanted)), (n, k)


@pytest.mark.parametrize("layout", [*MAKERS, "gpt-oss"])
def test_any_piece_is_a_piece_of_the_whole(layout: str, tmp_path: Path) -> None:
    """Blocks end within rows, bytes, words and bands."""
    if layout == "gpt-oss":
        name, tensors = "experts.gate_up_proj", gpt_oss("experts.gate_up_proj", torch.stack([edges(64, 40)] * 3))
        store(tmp_path, tensors, {"quant_method": "mxfp4"})
    else:
        name = NAME
        written(layout, tmp_path, edges(rows=272, cols=64))
    whole = decoded(tmp_path, name).view(-1) if layout != "ct FP8" else None
    with closing(open_values(Checkpoint.open(tmp_path))) as source:
        num = source.entries[name].info.num_elements
        whole = read_range(source, name, 0, num) if whole is None else whole
        for start, stop in ((0, 1), (1, 66), (63, 64), (num // 2 - 3, num // 2 + 3000), (num - 7, num), (5, num - 5)):
            assert torch.equal(read_range(source, name, start, stop), whole[start:stop])


def test_reading_a_block_reads_its_rows_and_the_scales_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("ct NVFP4", tmp_path, edges(rows=256, cols=1024))
    touched = 0
    plain = SafetensorsSource.read_bytes

    def count(self: SafetensorsSource, name: str, start: int, out: memoryview) -> None:
        nonlocal touched
        touched += len(out)
        plain(self, name, start, out)

    with StoredTensors.open(tmp_path) as stored:
        monkeypatch.setattr(SafetensorsSource, "read_bytes", count)
        for row in (3, 7):
            stored.values(NAME, row * 1024 + 5, (row + 2) * 1024)
    assert touched == 2 * 2 * 1024 // 2 + 256 * 1024 // 16 + 4


@pytest.mark.parametrize(("layout", "divides"), [("ct MXFP4", False), ("ct NVFP4", True)])
def test_only_a_second_scale_divides(layout: str, divides: bool, tmp_path: Path) -> None:
    written(layout, tmp_path, edges())
    with StoredTensors.open(tmp_path) as stored:
        grid = grid_of(stored.forms[NAME])
        assert grid is not None
        assert (grid.divides, grid.factor is not None) == (divides, divides)
