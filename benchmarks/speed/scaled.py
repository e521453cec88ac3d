"""Time, memory and compile error of scaled tensors next to the plain model.

    python -m benchmarks.speed.scaled [--hidden 512] [--layers 4] [--rounds 20] [--out FILE.json]
    python -m benchmarks.speed.scaled --compute fp8 --methods unit    # next to the plain model in bf16

Steps (forward and backward) of the plain and the scaled model alternate; reported are the median of the paired ratios
and its quartiles. Saved bytes are counted by saved-tensor hooks.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from benchmarks import common
from lpconv.scaled import ScaledTensor, saved_bytes, scaled
from lpconv.scaled.choices import OPERAND_SCALES, USUAL_OPERAND_SCALE

Batch = dict[str, Any]


def models(hidden: int, layers: int) -> dict[str, Callable[[], nn.Module]]:
    """BERT, GPT-2 and Llama of one size, without dropout, with sdpa attention."""
    heads, vocab, length = max(1, hidden // 64), 4096, 256
    bert = hf.BertConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=4 * hidden, max_position_embeddings=length, hidden_dropout_prob=0,
                         attention_probs_dropout_prob=0, attn_implementation="sdpa")  # fmt: skip
    gpt2 = hf.GPT2Config(vocab_size=vocab, n_positions=length, n_embd=hidden, n_layer=layers, n_head=heads,
                         resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
                         attn_implementation="sdpa")  # fmt: skip
    llama = hf.LlamaConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                           num_key_value_heads=max(1, heads // 2), intermediate_size=8 * hidden // 3 // 16 * 16,
                           max_position_embeddings=length, attn_implementation="sdpa")  # fmt: skip
    return {
        "bert": lambda: hf.BertForMaskedLM(bert),
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "llama": lambda: hf.LlamaForCausalLM(llama),
    }


def build(name: str, hidden: int, layers: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = models(hidden, layers)[name]()
    model.loss_type = "ForMaskedLM" if name == "bert" else "ForCausalLM"
    ids = torch.randint(0, 4096, (8, 128))
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return model, batch if name == "bert" else {**batch, "use_cache": False}


def step(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    model(**batch).loss.backward()


def paired(plain: nn.Module, ours: nn.Module, batch: Batch, rounds: int) -> dict[str, float]:
    """Medians of both models, and quartiles of the ratio of ours to plain."""
    for model in (plain, ours):
        step(model, batch)
    times = common.interleaved({"plain": partial(step, plain, batch), "ours": partial(step, ours, batch)}, rounds)
    ratios = [b / a for a, b in zip(times["plain"], times["ours"], strict=True)]
    low, middle, high = common.quartiles(ratios)
    return {
        "plain_s": statistics.median(times["plain"]),
        "ours_s": statistics.median(times["ours"]),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def grads(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    step(model, batch)
    gradients = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.dequantize() if isinstance(g, ScaledTensor) else g for n, g in gradients.items()}


def compile_error(plain: nn.Module, compiled: nn.Module, ours: nn.Module, batch: Batch) -> dict[str, float]:
    """Largest relative gradient error against eager mode, for the compiled plain model and for ours."""
    reference, theirs, mine = grads(plain, batch), grads(compiled, batch), grads(ours, batch)

    def worst(gradients: dict[str, torch.Tensor]) -> float:
        kept = {n: g for n, g in reference.items() if not n.endswith("key.bias")}  # zero in exact arithmetic
        return max(float((gradients[n] - g).norm() / g.norm()) for n, g in kept.items())

    return {"compile_error_plain": worst(theirs), "compile_error_ours": worst(mine)}


def measure(name: str, method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    plain, batch = build(name, options.hidden, options.layers)
    ours = scaled(
        copy.deepcopy(plain), method=method, compute=options.compute, operand_scale=options.operand_scale, strict=True
    )
    plain = plain if options.compute == "fp32" else plain.bfloat16()
    rows = [{"model": name, "method": method, "mode": "eager", **paired(plain, ours, batch, options.rounds)}]
    if not options.no_compile and options.compute == "fp32":
        torch._dynamo.reset()
        plain_compiled = torch.compile(copy.deepcopy(plain), fullgraph=True)
        ours_compiled = torch.compile(ours, fullgraph=True)
        timing = paired(plain_compiled, ours_compiled, batch, options.rounds)
        error = compile_error(plain, plain_compiled, ours_compiled, batch)
        rows.append({"model": name, "method": method, "mode": "compiled", **timing, **error})
    return rows


def memory(name: str, options: argparse.Namespace) -> dict[str, Any]:
    plain, batch = build(name, options.hidden, options.layers)
    ours = saved_bytes(scaled(copy.deepcopy(plain), compute="fp8"), batch)
    theirs = saved_bytes(plain.bfloat16(), batch)
    return {"model": name, "saved_bytes_fp8": ours, "saved_bytes_bf16": theirs, "ratio": ours / theirs}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "llama"])
    parser.add_argument("--methods", nargs="+", default=["unit", "scalify"])
    parser.add_argument("--compute", choices=("fp32", "fp8"), default="fp32", help="fp8 is timed in eager mode only")
    parser.add_argument("--operand-scale", choices=OPERAND_SCALES, default=USUAL_OPERAND_SCALE, help="of fp8 operands")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    result = {
        "command": common.command(),
        "machine": common.machine(),
        "threads": torch.get_num_threads(),
        "time": [
            row for name in options.models for method in options.methods for row in measure(name, method, options)
        ],
        "memory": [memory(name, options) for name in options.models],
    }
    print(json.dumps(result, indent=1))
    common.save(result, options.out)


if __name__ == "__main__":
    main()
