"""Round a model with another package, inside that package's environment. Started by `peers.py`.

    ENVIRONMENT/bin/python peer_rounding.py JOB.json

The job names the package, its method, the element format ("int2" to "int6", "nvfp4", "mxfp4" or "fp8") and group size,
the source, the output, and a file of token ids for calibration. This file imports neither lpconv nor other benchmarks.
Settings are the package's defaults unless the method's name says otherwise. Embeddings and heads are not rounded.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

_PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "fp8": "FP8_DYNAMIC"}
_NVFP4_OBSERVERS = {"mse": "nvfp4_expanded_mse", "imatrix_mse": "nvfp4_expanded_imatrix"}


def opened(job: dict[str, Any]) -> tuple[Any, Any, Tensor]:
    """The source model, its tokenizer, and the token ids of the calibration text, [N, L]."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    ids = torch.tensor(json.loads(Path(job["windows"]).read_text()))
    return model, AutoTokenizer.from_pretrained(job["model"]), ids


def left_out(model: nn.Module, group: int | None) -> list[str]:
    """Linear layers that are not rounded: the head, and layers whose rows are not whole groups."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return [name for name, m in linear.items() if name == "lm_head" or m.in_features % (group or 1)]


def llm_compressor(job: dict[str, Any]) -> None:
    """Methods: "gptq", "awq" or "nearest", optionally followed by an observer of scales, as in "gptq imatrix_mse"."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    torch.Tensor.pin_memory = lambda self, device=None: self  # AWQ in version 0.14.0.1 fails without an accelerator
    model, tokenizer, ids = opened(job)
    method, _, observer = job["method"].partition(" ")
    scheme = preset_name_to_scheme(_PRESETS.get(job["element"], "W4A16"), ["Linear"])
    if job["element"].startswith("int"):
        scheme.weights.group_size, scheme.weights.num_bits = job["group"], int(job["element"][3:])
    if observer:
        scheme.weights.observer = _NVFP4_OBSERVERS[observer] if job["element"] == "nvfp4" else observer
    settings = {"config_groups": {"group_0": scheme}, "ignore": left_out(model, job["group"])}
    recipe = [GPTQModifier(**settings)] if method == "gptq" else [QuantizationModifier(**settings)]
    if method == "awq":
        recipe.insert(0, AWQModifier())
    text = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    oneshot(
        model=model, tokenizer=tokenizer, recipe=recipe, dataset=text, num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1], shuffle_calibration_samples=False, batch_size=8,
    )  # fmt: skip
    model.save_pretrained(job["output"], save_compressed=True)


def auto_round(job: dict[str, Any]) -> None:
    """Method: the number of tuning steps per block; 0 is rounding to nearest with searched scales."""
    from auto_round import AutoRound

    model, tokenizer, ids = opened(job)
    scheme = {"nvfp4": "NVFP4", "mxfp4": "MXFP4"}.get(job["element"], f"W{job['element'][3:]}A16")
    kept = left_out(model, job["group"])
    made = AutoRound(
        model, tokenizer, scheme=scheme, group_size=job["group"], act_bits=16, iters=int(job["method"]),
        dataset=[x[None] for x in ids], nsamples=len(ids), seqlen=ids.shape[1], device_map="cpu",
        layer_config={name: {"bits": 16} for name in kept if name != "lm_head"},
    )  # fmt: skip
    output = Path(job["output"])
    folder = output.with_name(f"{output.name}.made")
    made.quantize_and_save(str(folder), format=job.get("format", "llm_compressor"))
    next(folder.rglob("config.json")).parent.rename(output)  # AutoRound saves into a subfolder named after the scheme


def gptqmodel(job: dict[str, Any]) -> None:
    """Methods: "gptq", or "gptq desc_act" for columns in the order of their inputs' size."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # version 7.6.0 fails on two cores without it
    os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"  # it packs in Python instead of compiling for minutes
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    ids = torch.tensor(json.loads(Path(job["windows"]).read_text()))
    config = QuantizeConfig(
        bits=int(job["element"][3:]), group_size=job["group"], sym=True,
        desc_act=job["method"].endswith("desc_act"), device="cpu",
    )  # fmt: skip
    model = GPTQModel.load(job["model"], config, backend=BACKEND.TORCH)
    model.quantize([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids], batch_size=8)
    model.save(job["output"])


def transformers_fp8(job: dict[str, Any]) -> None:
    """Methods: "float" or "ue8m0", the format of scales of 128x128 blocks."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for a GPU, which only running the quantised model needs.
    quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None
    linear = {n: m.weight for n, m in opened(job)[0].named_modules() if isinstance(m, nn.Linear)}
    kept = [n for n, w in linear.items() if n == "lm_head" or any(side % 128 for side in w.shape)]
    config = FineGrainedFP8Config(scale_fmt=job["method"], modules_to_not_convert=kept)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", quantization_config=config)
    model.save_pretrained(job["output"])


def auto_scheme(job: dict[str, Any]) -> None:
    """Method: average bits without scales, and "fused" for one width in each group that vLLM fuses, or "free".

    The output is a JSON file with the width of each layer. AutoScheme counts layers that it cannot round,
    such as demo's head with a side that is no multiple of 32, with 16 bits.
    """
    from auto_round import AutoRound, AutoScheme
    from auto_round.schemes import QuantizationScheme

    model, tokenizer, ids = opened(job)
    bits, groups = job["method"].split()
    text = Path(job["output"]).with_suffix(".text.json")
    text.write_text(json.dumps([tokenizer.decode(x) for x in ids]))
    fused = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]] if groups == "fused" else None
    layers = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    wide = sum(w.numel() for w in layers.values() if any(side % 32 for side in w.shape))
    rounded = sum(w.numel() for n, w in layers.items() if n != "lm_head")
    average = float(bits) + (16 - float(bits)) * wide / (rounded + wide)
    options = [QuantizationScheme(bits=b, group_size=job["group"], sym=True) for b in (2, 3, 4, 5, 6, 8)]
    scheme = AutoScheme(
        avg_bits=average, options=options, ignore_scale_zp_bits=True,
        shared_layers=fused, dataset=str(text), nsamples=len(ids), seqlen=ids.shape[1] - 2, device_map="cpu",
        low_gpu_mem_usage=False, low_cpu_mem_usage=False,
    )  # fmt: skip
    made = AutoRound(
        model, tokenizer, scheme=scheme, iters=0, dataset=str(text), device_map="cpu", disable_model_free=True
    )
    made.post_init()
    Path(job["output"]).write_text(json.dumps({n: c["bits"] for n, c in made.layer_config.items()}))


PEERS = {
    "auto-scheme": auto_scheme, "llm-compressor": llm_compressor, "auto-round": auto_round, "gptqmodel": gptqmodel,
    "transformers": transformers_fp8,
}  # fmt: skip

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    PEERS[job["peer"]](job)
