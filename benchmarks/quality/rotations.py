"""Rotations folded into the weights before a conversion: KL to the source on two held-out texts, by seed.

    python -m benchmarks.quality.rotations --out FILE.json --model demo [--rotations fold block full] [--seeds 0 1 2]

The weight of each RMSNorm is folded into the linear layers that read it. Then the states between layers are rotated
(R1 of SpinQuant, arXiv 2405.16406), and the values of each head (R2). "fold" only folds; "block" rotates by the largest
Hadamard matrix whose size divides the hidden size, repeated along the diagonal; "full" also mixes these blocks by a
random orthogonal matrix. Seeds choose the signs. The rotated model is an ordinary checkpoint in fp32 whose head is no
longer tied to the embedding; both stay wide in conversions. The difference from the source is that of the logits,
relative to the largest logit, in fp32 and, before weights are rounded to fp32, in fp64. Texts and options are those of
`feedback`, calibration is on plays. qwen3 is trained here (`planted_outliers`).
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks import common
from benchmarks.quality.feedback import CASES, measure_models
from benchmarks.quality.held_out import compare_texts, converted, predictions, texts, windows_of

MODELS = ("smollm2", "qwen3", "demo")


def random_rotation(size: int, kind: str, random: torch.Generator) -> Tensor:
    """An orthogonal matrix in fp64 with random signs: Hadamard blocks, or the identity for "fold"."""
    if kind == "fold":
        return torch.eye(size, dtype=torch.float64)
    block = size & -size
    mixed = torch.eye(size // block, dtype=torch.float64)
    if kind == "full":
        mixed = torch.linalg.qr(torch.randn(*mixed.shape, dtype=torch.float64, generator=random)).Q.contiguous()
    butterfly = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    for _ in range(block.bit_length() - 1):
        mixed = torch.kron(mixed, butterfly)
    signs = torch.randint(2, (size,), generator=random).double() * 2 - 1
    return signs[:, None] * mixed


def fold(norm: nn.Module, readers: list[nn.Linear]) -> None:
    """Move the weight of an RMSNorm into the linear layers that read its output."""
    weight = norm.get_parameter("weight")
    for linear in readers:
        linear.weight *= weight
    weight.fill_(1)


def rotate_values(attention: Any, rotation: Tensor) -> None:
    """Rotate the values of each head, and the columns of the output projection back."""
    size, value, output = len(rotation), attention.v_proj.weight, attention.o_proj.weight
    value.copy_((rotation.T @ value.unflatten(0, (-1, size))).flatten(0, 1))
    output.copy_((output.unflatten(1, (-1, size)) @ rotation).flatten(1))


@torch.no_grad()
def rotate(model: Any, kind: str, seed: int) -> None:
    """Fold the norms of a Llama or Qwen3 in fp64 and rotate it in place; its function stays and its head is untied."""
    random, config = torch.Generator().manual_seed(seed), model.config
    rotation = random_rotation(config.hidden_size, kind, random)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    config.tie_word_embeddings = False
    readers = [model.lm_head]
    fold(model.model.norm, readers)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        fold(layer.input_layernorm, inputs)
        fold(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        readers += [*inputs, mlp.gate_proj, mlp.up_proj]
        rotate_values(attention, random_rotation(attention.head_dim, kind, random))
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.copy_(rotation.T @ linear.weight)
    for linear in [model.model.embed_tokens, *readers]:
        linear.weight.copy_(linear.weight @ rotation)


def rotated(source: Path, output: Path, kind: str, seed: int, ids: Tensor) -> dict[str, float]:
    """Write a rotated copy of a model and return how much it changes the logits on `ids`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    for name, norm in [(n, m) for n, m in model.named_modules() if n.endswith("norm")]:  # fp32 in transformers
        exact = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
        exact.weight = norm.weight
        model.set_submodule(name, exact)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        rotate(model, kind, seed)
        difference = {"fp64": relative(model(input_ids=ids).logits, wanted)}
        model.float().save_pretrained(output)
        for file in source.glob("tokenizer*"):
            shutil.copy(file, output)
        fp32 = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, output)]
        difference["fp32"] = relative(fp32[1](input_ids=ids).logits, fp32[0](input_ids=ids).logits)
    return difference | {"bytes_of_the_head": fp32[1].lm_head.weight.nbytes}


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def measure(name: str, source: Path, folder: Path, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add every missing case of the source and of its rotated copies to the result, and save it after each."""
    windows = windows_of(source, texts(folder))
    wanted = predictions(source, windows)
    copies = [(kind, seed) for kind in args.rotations for seed in (args.seeds if kind != "fold" else [0])]
    for kind, seed in [("source", 0), *copies]:
        rows = result.setdefault(name, {}).setdefault(
            kind if kind in ("source", "fold") else f"{kind}, seed {seed}", {}
        )
        missing = [case for case in args.cases if case not in rows]
        model, output = source if kind == "source" else folder / "rotated", folder / "out"
        if missing and kind != "source":
            rows["difference"] = rotated(source, model, kind, seed, windows["plays"][:4])
        for case in missing:
            options = CASES[case] + " --calibrate demo" * ("gptq" in case)
            shutil.rmtree(output, ignore_errors=True)
            converted(model, output, options)
            rows[case] = compare_texts(wanted, predictions(output, windows))
            common.save(result, args.out)
            print(name, kind, seed, case, json.dumps(rows[case]), flush=True)


def main() -> None:
    parser = common.parser(__doc__, work="where models are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rotations", nargs="+", default=["fold", "block", "full"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    measure_models(measure, args)


if __name__ == "__main__":
    main()
