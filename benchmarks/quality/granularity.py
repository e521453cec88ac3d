"""Layouts of compressed-tensors, as lpconv writes them and as the package itself rounds to nearest.

    python -m benchmarks.quality.granularity --out FILE.json [--model demo minilm smollm2]

For the same `Linear` weights in both: stored bits per weight, 10·log10(Σx² / Σ(x - x̂)²), and on held-out plays in fp32
the KL of the source in nats per token, the share of equal first choices, and the loss. MiniLM has no head, so its
figure is the relative error of the last hidden states. The package rounds by `calculate_qparams` and `fake_quantize`:
minima and maxima without calibration, and fp32 scales if the layout leaves them open. SmolLM2's weights had 4 bits
before, so its figures compare layouts, not models. Existing rows of the file are not measured again.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from torch.nn import functional

import lpconv
from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.held_out import compare, outputs_of, windows_of
from lpconv.convert.run import convert
from lpconv.data import demo_text
from lpconv.formats.grains import get_grain
from lpconv.layouts.compressed_config import preset_of
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions

WINDOWS = 4

# Layout, by the package's name, and the options of the conversion.
FORMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("FP8", {"format": "e4m3fn"}),
    ("FP8_DYNAMIC", {"format": "e4m3fn", "granularity": "row"}),
    ("FP8_BLOCK", {"format": "e4m3fn", "granularity": "128x128"}),
    ("MXFP8", {"format": "e4m3fn", "granularity": "mx"}),
    ("W8A16, groups of 128, powers of two", {"format": "int8", "granularity": "group:128", "scale": "pow2"}),
    ("W8A16, groups of 128", {"format": "int8", "granularity": "group:128"}),
    ("NVFP4A16", {"format": "e2m1", "granularity": "nvfp4"}),
    ("NVFP4A16, exact scale", {"format": "e2m1", "granularity": "nvfp4", "scale": "exact"}),
    ("MXFP4A16", {"format": "e2m1", "granularity": "mx"}),
    ("W4A16, groups of 32, powers of two", {"format": "int4", "granularity": "group:32", "scale": "pow2"}),
    ("W4A16, groups of 32", {"format": "int4", "granularity": "group:32"}),
    ("W4A16, groups of 128", {"format": "int4", "granularity": "group:128"}),
)


def rounded(x: Tensor, settings: Mapping[str, str]) -> Tensor:
    """The weight after compressed-tensors has stored and read it."""
    preset = preset_of(settings["format"], get_grain(settings.get("granularity", "tensor")))
    assert preset is not None
    args = QuantizationArgs(**preset.weights)
    factor = generate_gparam(*torch.aminmax(x)) if args.strategy == "tensor_group" else None
    if args.strategy == "tensor":
        ends = tuple(e.reshape(1) for e in torch.aminmax(x))
    elif args.strategy == "block":
        height, width = args.block_structure
        rows, cols = -(-x.shape[0] // height), -(-x.shape[1] // width)
        padded = functional.pad(x, (0, cols * width - x.shape[1], 0, rows * height - x.shape[0]))
        tiles = padded.view(rows, height, cols, width).transpose(1, 2).flatten(2)
        ends = (tiles.amin(-1), tiles.amax(-1))
    else:
        tiles = x.unflatten(1, (-1, args.group_size or x.shape[1]))
        ends = (tiles.amin(-1), tiles.amax(-1))
    scale, zero = calculate_qparams(*ends, args, global_scale=factor)
    return fake_quantize(x, scale, zero, args, global_scale=factor).float()


def figures(source: Tensor, got: Tensor, ids: Tensor, *, has_head: bool) -> dict[str, float]:
    if not has_head:
        return {"rel_error": float((got - source).norm() / source.norm())}
    logits = got.view(*ids.shape, -1)[:, :-1].flatten(0, 1)
    return {**compare(source, got), "loss": float(functional.nll_loss(logits, ids[:, 1:].flatten()))}


def sqnr(weights: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    signal = sum(float(weights[n].double().square().sum()) for n in got)
    noise = sum(float((got[n] - weights[n]).double().square().sum()) for n in got)
    return 10 * math.log10(signal / noise)


def measure(path: Path, folder: Path, rows: dict[str, Any], save: Any) -> None:
    model = lpconv.load(path, dtype=torch.float32)
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    (windows,) = windows_of(path, {"plays": demo_text("heldout")}, WINDOWS).values()
    source, has_head = outputs_of(model, windows), type(model).__name__.endswith("CausalLM")
    if "source" not in rows:
        rows["source"] = figures(source, source, windows, has_head=has_head)

    def with_weights(got: Mapping[str, Tensor]) -> dict[str, float]:
        with torch.no_grad():
            for name, x in got.items():
                model.get_parameter(name).copy_(x)
            answer = figures(source, outputs_of(model, windows), windows, has_head=has_head)
            for name in got:
                model.get_parameter(name).copy_(plain[name])
        return {"sqnr_db": sqnr(plain, got), **answer}

    for i, (name, settings) in enumerate(FORMS):
        if name in rows:
            continue
        options = ConvertOptions(layout="compressed-tensors", verify="none", **settings)  # type: ignore[arg-type]
        result = convert(str(path), folder / str(i), options)
        done = [t for t in result.tensors if t.action == "convert"]
        with StoredTensors.open(folder / str(i)) as stored:
            ours = {t.name: stored.tensor(t.name).float() for t in done}
        theirs = {n: rounded(plain[n], settings) for n in ours}
        rows[name] = {
            "tensors": len(done),
            "bits": 8 * sum(t.bytes_out for t in done) / sum(math.prod(t.shape) for t in done),
            "lpconv": with_weights(ours),
            "compressed-tensors": with_weights(theirs),
        }
        save()
        print(name, json.dumps(rows[name]))


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "minilm", "smollm2"])
    args = parser.parse_args()
    result = common.load_or_begin(args.out)

    for model in args.model:
        with tempfile.TemporaryDirectory() as name:
            folder, save = Path(name), partial(common.save, result, args.out)
            measure(model_folder(model, folder), folder, result.setdefault(model, {}), save)


if __name__ == "__main__":
    main()
