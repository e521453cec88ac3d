"""Files of other quantisers, read by lpconv: every weight compared with what the quantiser or its readers decode.

    python -m benchmarks.quality.peer_files make --work DIRECTORY     # where llmcompressor and auto-round are installed
    python -m benchmarks.quality.peer_files read --work DIRECTORY --out FILE.json
    python -m benchmarks.quality.peer_files make --peers modelopt --work OTHER     # where nvidia-modelopt is
    python -m benchmarks.quality.peer_files read --work OTHER --out FILE.json

`make` draws a small Llama in bf16 and rounds it on a CPU with llm-compressor (`oneshot`) and AutoRound (no tuning
steps), in each of their schemes without calibration data, and with ModelOpt (`quantize` on random ids). Plain
transformers opens neither GPTQ, AWQ nor ModelOpt files, so `make` saves their weights as well: as AutoRound's
`QuantLinear` and `dequantize_gemm` decode them, and as ModelOpt's tensor classes do. ModelOpt has no class for 4-bit
integers; its packing function is inverted, and the logits of its model are saved. `read` compares all weights with
those that lpconv decodes, in the dtype of the package, runs `inspect --strict` and `verify`, and lists refusals.
Neither needs a network.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import common

_SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4A16", "NVFP4A16", "W4A16", "W8A16", "INT8")
_EXPORTS = (("auto_gptq", "W4A16"), ("auto_awq", "W4A16"), ("llm_compressor", "MXFP4"), ("fp8", "FP8_BLOCK"))
_MODELOPT = (
    "FP8_DEFAULT", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "MXFP8_DEFAULT", "MXFP4_DEFAULT",
    "W4A8_MXFP4_FP8", "NVFP4_DEFAULT", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "INT8_DEFAULT", "INT8_WEIGHT_ONLY",
    "INT4_BLOCKWISE_WEIGHT_ONLY", "INT4_AWQ", "W4A8_AWQ_BETA",
)  # fmt: skip
_THEIRS, _IDS, _LOGITS = "theirs.safetensors", "ids", "logits"


def make(work: Path, peers: Sequence[str]) -> None:
    source, packages = draw(work / "source"), [p for peer in peers for p in _PEERS[peer][1]]
    common.save(common.versions(*packages, "torch", "transformers"), work / "versions.json")
    for peer in peers:
        _PEERS[peer][0](source, work)


def llm_compressor(source: Path, work: Path) -> None:
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
    from transformers import LlamaForCausalLM

    for scheme in _SCHEMES:
        model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
                tokenizer=tokenizer(source))  # fmt: skip
        model.save_pretrained(work / f"llm-compressor {scheme}", save_compressed=True)


def auto_round(source: Path, work: Path) -> None:
    from auto_round import AutoRound  # type: ignore[import-not-found]
    from transformers import LlamaForCausalLM

    for layout, scheme in _EXPORTS:
        model, made = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16), work / "made"
        rounder = AutoRound(model, tokenizer(source), scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu")
        rounder.quantize_and_save(str(made), format=layout)
        (config,) = made.rglob("config.json")
        target = work / f"AutoRound {layout} {scheme}"
        shutil.copytree(config.parent, target)
        shutil.rmtree(made)
        if layout in ("auto_gptq", "auto_awq"):
            save_file(decoded(load_file(target / "model.safetensors"), layout), work / f"{target.name}.{_THEIRS}")


def modelopt(source: Path, work: Path) -> None:
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]
    from modelopt.torch.export.unified_export_hf import (  # type: ignore[import-not-found]
        requantize_resmooth_fused_llm_layers,
    )
    from transformers import LlamaForCausalLM

    for scheme in _MODELOPT:
        torch.manual_seed(0)
        model, ids = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16), torch.randint(0, 512, (2, 64))
        mtq.quantize(model, copy.deepcopy(getattr(mtq, f"{scheme}_CFG")), lambda m, ids=ids: m(input_ids=ids))
        logits = {}
        if scheme.startswith("INT4"):  # the only schemes that keep inputs unquantised and run on a CPU
            requantize_resmooth_fused_llm_layers(model)  # the export starts with this: it moves factors into norms
            with torch.inference_mode():
                logits = {_IDS: ids, _LOGITS: model(input_ids=ids).logits.clone()}
        target = work / f"ModelOpt {scheme}"
        export_hf_checkpoint(model, export_dir=target)
        theirs = decoded_by_modelopt(load_file(target / "model.safetensors"))
        save_file(theirs | logits, work / f"{target.name}.{_THEIRS}")


_PEERS: Mapping[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "llm-compressor": (llm_compressor, ("llmcompressor", "compressed-tensors")),
    "auto-round": (auto_round, ("auto-round",)),
    "modelopt": (modelopt, ("nvidia-modelopt",)),
}


def draw(source: Path) -> Path:
    """The model that all packages round: normally distributed weights with one large and one zero row per MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data[3] *= 30
        layer.mlp.gate_proj.weight.data[5] = 0
    model.save_pretrained(source)
    return source


def tokenizer(source: Path) -> Any:
    """A tokenizer of 512 words, for packages that require one; nothing is tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(512)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0")
    made.name_or_path = str(source)
    return made


def decoded(stored: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """The weights of GPTQ and AWQ files, [out, in], decoded by AutoRound's own kernels."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm  # type: ignore[import-not-found]
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear  # type: ignore[import-not-found]

    weights = {}
    for module in (n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")):
        parts = {n.removeprefix(module + "."): x for n, x in stored.items() if n.startswith(module + ".")}
        groups, out_features = parts["scales"].shape
        if layout == "auto_awq":
            in_features = len(parts["qweight"])
            weight = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, in_features // groups)
        else:
            in_features = len(parts["qweight"]) * 8
            size, order = in_features // groups, parts.pop("g_idx")
            assert torch.equal(order, torch.arange(in_features).div(size, rounding_mode="floor").int())
            layer = QuantLinear(4, size, in_features, out_features, bias=False)  # groups are neighbours
            layer.load_state_dict(parts)
            weight = layer(torch.eye(in_features, dtype=parts["scales"].dtype))
        weights[f"{module}.weight"] = weight.t().contiguous()
    return weights


def decoded_by_modelopt(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp32, decoded by ModelOpt's tensor classes; it has none for 4-bit integers."""
    from modelopt.torch.quantization.qtensor import (  # type: ignore[import-not-found]
        FP8QTensor,
        INT8QTensor,
        MXFP4QTensor,
        MXFP8QTensor,
        NVFP4QTensor,
    )

    weights = {}
    for name, scale in ((n.removesuffix("_scale"), x) for n, x in stored.items() if n.endswith(".weight_scale")):
        codes, second = stored[name], stored.get(name + "_scale_2")
        settings: dict[str, Any] = {"scale": scale}
        if codes.dtype == torch.int8:
            kind, settings["scale"] = INT8QTensor, scale[:, None]
        elif scale.dtype == torch.uint8:
            kind = MXFP4QTensor if codes.dtype == torch.uint8 else MXFP8QTensor
            settings["block_sizes"] = {-1: 32}
        elif scale.dtype == torch.float8_e4m3fn:
            kind = NVFP4QTensor
            settings |= {"double_scale": second, "block_sizes": {-1: codes.shape[-1] * 2 // scale.shape[-1]}}
        elif codes.dtype == torch.uint8:
            columns = stored.get(f"{name.removesuffix('weight')}pre_quant_scale", torch.ones(1))
            wide = scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
            weights[name] = unpacked(codes) * wide * columns.float()
            continue
        elif scale.dim() == 4:
            kind = FP8QTensor
            settings = {"scale": scale.squeeze((1, 3)), "block_sizes": {-1: 128, -2: 128}}
        else:
            kind = FP8QTensor
            settings["scale"] = scale[:, None] if scale.dim() else scale
        shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)))
        weights[name] = kind(shape, torch.float32, codes).dequantize(dtype=torch.float32, **settings).contiguous()
    return weights


def unpacked(codes: Tensor) -> Tensor:
    """Invert ModelOpt's `pack_int4_in_uint8`: integers [2 rows, cols] from packed bytes."""
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8  # type: ignore[import-not-found]

    numbers = torch.arange(-8, 8).float()
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)))
    made = pack_int4_in_uint8(pairs, torch.ones(2, 1), 256).view(-1)
    integers = pairs[:, made.argsort()][:, codes.long()]
    return integers.movedim(0, 1).reshape(-1, codes.shape[1])


def read(work: Path) -> dict[str, Any]:
    rows = {}
    for path in sorted(p for p in work.iterdir() if p.is_dir() and p.name != "source"):
        rows[path.name] = compared(path, work)
        print(path.name, rows[path.name])
    return {"versions": json.loads((work / "versions.json").read_text()), "rows": rows}


def compared(path: Path, work: Path) -> dict[str, Any]:
    from lpconv.errors import LpconvError
    from lpconv.inspect.headers import inspect
    from lpconv.layouts.reader import StoredTensors
    from lpconv.progress import Silent
    from lpconv.verify.compare import compare

    theirs = their_weights(path, work)
    try:
        opened = StoredTensors.open(path)
    except LpconvError as e:
        return {"refused": str(e)}
    with opened as stored:
        coded = [n for n, form in stored.forms.items() if form.format is not None]
        equal = [torch.equal(stored.tensor(n).to(theirs[n].dtype), theirs[n]) for n in coded]
        words = sorted({stored.forms[n].words for n in coded})
    logits = {"logits_rms_difference": logits_difference(path, theirs)} if _LOGITS in theirs else {}
    inspected = inspect(path)
    verified = compare(path, work / "source", gates=(), progress=Silent())
    assert verified.weights is not None
    return {
        "stored": words,
        "weights": len(coded),
        "equal": sum(equal),
        "dtype": str(theirs[coded[0]].dtype),
        "problems": inspected.problems,
        "warnings": inspected.warnings,
        "min_sqnr_db": verified.weights.min_sqnr_db,
        "passed": verified.passed,
        **logits,
    }


def logits_difference(path: Path, theirs: Mapping[str, Tensor]) -> float:
    """Relative rms difference between the logits of the weights as lpconv reads them and ModelOpt's logits."""
    import lpconv

    with torch.inference_mode():
        ours = lpconv.load(path, dtype=torch.bfloat16)(input_ids=theirs[_IDS]).logits.float()
    wanted = theirs[_LOGITS].float()
    return float((ours - wanted).norm() / wanted.norm())


def their_weights(path: Path, work: Path) -> dict[str, Tensor]:
    """The weights as the package itself, or plain transformers, decodes them."""
    import transformers

    left = work / f"{path.name}.{_THEIRS}"
    if left.exists():
        return load_file(left)
    method = json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"]
    config = {"fp8": transformers.FineGrainedFP8Config, "compressed-tensors": transformers.CompressedTensorsConfig}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config[method](dequantize=True))
    return {n: p.detach() for n, p in model.named_parameters()}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("make", "read"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=["llm-compressor", "auto-round"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "make":
        make(args.work, args.peers)
        return
    common.save(read(args.work), args.out)


if __name__ == "__main__":
    main()
