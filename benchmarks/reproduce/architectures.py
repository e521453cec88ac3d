"""Gradients of scaled models next to the plain model's, for every model class that transformers can build small.

    python -m benchmarks.reproduce.architectures --out FILE.json [--only NAME…] [--workers 2]

The classes come from transformers' own mappings. Each is built from its config with two layers of width 32, random
weights and no dropout, and takes one training step in fp32: plain, and with `scaled` by unit scaling and by Scalify,
with eager attention and with sdpa if the class has both. A class is "bitwise" if loss and all gradients are equal,
"close" if no gradient differs from the plain one by more than 1e-6 of its norm, "refused" if an `LpconvError` names the
reason, and "different" otherwise. Nothing may be different.
"""

import contextlib
import copy
import importlib
import inspect
import json
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks import common
from lpconv.errors import LpconvError
from lpconv.scaled import fallbacks, scaled

CLOSE = 1e-6
METHODS = ("unit", "scalify")
PATIENCE_S, LARGEST = 60, 20_000_000
BATCH, LENGTH, VOCABULARY = 2, 16, 99

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
           "num_encoder_layers", "num_decoder_layers", "num_blocks", "num_hidden_blocks")  # fmt: skip

# Sizes by the ending of a config field's name; the first match counts.
_SIZES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("rotary_dim",), 8),
    (("mamba_n_heads", "mamba_num_heads", "ssm_num_heads"), 8),
    (("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    (("num_attention_heads", "attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    (_LAYERS, 2),
    (("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    (("v_head_dim", "head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "attention_head_size", "d_head",
      "kv_channels"), 8),
    (("state_size", "mamba_d_state", "ssm_state_size", "d_state"), 8),
    (("q_lora_rank", "kv_lora_rank"), 16),
    (("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "mlp_dim", "feedforward_dim", "ffn_hidden_size",
      "dim_feedforward"), 64),
    (("hidden_size", "d_model", "n_embd", "embedding_size", "embed_dim", "hidden_dim", "projection_dim", "dim",
      "emb_dim", "model_dim", "hidden_sizes"), 32),
    (("vocab_size",), VOCABULARY),
    (("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"), 64),
    (("image_size",), 32),
    (("patch_size",), 8),
)  # fmt: skip


# Settings that cannot be derived from the names of fields, by model type.
_CHANGES: dict[str, dict[str, Any]] = {
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "swin": {"image_size": 64, "patch_size": 4, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4]},
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1]},
    "zamba2": {"attention_head_dim": 16},
}


def classes() -> dict[str, str]:
    """Model type of every model class in transformers' mappings, sorted by type."""
    types: dict[str, str] = {}
    for name in sorted(n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")):
        for model_type, named in getattr(modeling_auto, name).items():
            for each in (named,) if isinstance(named, str) else named:
                types.setdefault(each, model_type)
    return dict(sorted(types.items(), key=lambda item: (item[1], item[0])))


# Mappings that choose the class of a model type for --one-per-type.
_PREFERRED = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC",
              "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION",
              "SEQUENCE_CLASSIFICATION")  # fmt: skip


def one_per_type() -> dict[str, str]:
    """The class with the most usual head, or without one, for each model type."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{n}_MAPPING_NAMES") for n in _PREFERRED]
    chosen = {}
    for class_name, model_type in classes().items():
        named = next((m[model_type] for m in mappings if model_type in m), None)
        chosen.setdefault(model_type, named or modeling_auto.MODEL_MAPPING_NAMES.get(model_type, class_name))
    return {(n if isinstance(n, str) else n[0]): t for t, n in chosen.items()}


def small_config(config_class: Any) -> Any:
    """The default config with two layers of width 32, in its sub-configs too."""
    default = config_class()
    parts = {name: getattr(default, name, None) for name in getattr(config_class, "sub_configs", {})}
    small = {k: small_config(type(part)).to_dict() for k, part in parts.items() if part is not None}
    sizes = {k: _small(k, v) for k, v in default.to_dict().items() if k not in parts}
    layers = [v for k, v in default.to_dict().items() if _ends(k, _LAYERS) and isinstance(v, int)]
    for name, value in list(sizes.items()):
        if name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types") and isinstance(value, list):
            sizes[name] = _two_kinds(value)
        elif isinstance(value, list) and layers and len(value) == layers[0] > 2:
            sizes[name] = value[:2]
    changed = {k: v for k, v in sizes.items() if v != default.to_dict()[k] and k != "qk_head_dim"}
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:  # with a latent, heads do not share keys
        changed["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, rope in sizes.items():
        if isinstance(rope, dict) and "mrope_section" in rope:
            changed[name] = {**rope, "mrope_section": [1, 1, 2]}
    changed |= _CHANGES.get(config_class.model_type, {})
    return config_class(**changed, **small)


def _two_kinds(kinds: list[Any]) -> list[Any]:
    """Two layers, of different kinds if the model has several."""
    different = list(dict.fromkeys(kinds))
    return (different + kinds)[:2]


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return name in endings or name.endswith(tuple(f"_{e}" for e in endings))


def _small(name: str, value: Any) -> Any:
    """The value of a config field in a small model."""
    if name == "use_cache":
        return False
    if name == "pad_token_id" and value is None:
        return 0
    if name == "vocab_size" and value is None:
        return VOCABULARY
    if isinstance(value, bool) or value is None:
        return value
    if "drop" in name and isinstance(value, float):
        return 0.0
    if name.endswith("_period") and isinstance(value, int):
        return min(value, 2)
    if name.endswith("_offset") and isinstance(value, int):
        return min(value, 1)
    if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
        return 3 + sum(map(ord, name)) % (VOCABULARY - 10)
    for endings, size in _SIZES:
        if _ends(name, endings):
            if isinstance(value, int):
                return min(size, value) if value > 0 else value
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
                return [2 if "heads" in name else min(size, v) for v in value]
    return value


def build(class_name: str, model_type: str, attention: str) -> nn.Module:
    """The model in training mode without dropout, with noise added to parameters that start as constants."""
    own = getattr(getattr(transformers, class_name), "config_class", None)
    config = small_config(own or configuration_auto.CONFIG_MAPPING[model_type])
    config._attn_implementation = attention
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in getattr(transformers, class_name)(copy.deepcopy(config)).parameters())
    if num_parameters > LARGEST:
        raise ValueError(f"{num_parameters} parameters are more than {LARGEST}")
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    model.set_attn_implementation(attention) if hasattr(model, "set_attn_implementation") else None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.float().train()


def inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Batches to try in turn, with different sets of arguments of the forward pass."""
    known = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(7)
    text = config.get_text_config()
    vocabulary = min(VOCABULARY, getattr(text, "vocab_size", None) or VOCABULARY)
    ids = torch.randint(3, max(4, vocabulary - 4), (BATCH, LENGTH), generator=generator)
    special = {v for k, v in config.to_dict().items() if k.endswith("token_id") and isinstance(v, int)}
    ids = torch.where(
        torch.isin(ids, torch.tensor(sorted(special) or [-1])), next(i for i in range(3, 90) if i not in special), ids
    )
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    vision = getattr(config, "vision_config", None) or config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3) or 3
    size = getattr(vision, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    audio = getattr(config, "audio_config", None) or config
    bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "feature_size", None) or 80
    offers: dict[str, Tensor] = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": ids[:, :8].contiguous(),
        "pixel_values": torch.randn(BATCH, channels, height, width, generator=generator),
        "input_features": torch.randn(BATCH, bins, 128, generator=generator),
        "input_values": torch.randn(BATCH, 4000, generator=generator),
        "bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
    }
    main = getattr(model, "main_input_name", "input_ids")
    with_text = {"input_ids", "attention_mask"} & set(known)
    choices = [
        {main},
        {main, "attention_mask"} & {main, *with_text},
        {main, *with_text},
        {*with_text},
        {"pixel_values"},
        {"input_values"},
        {"input_features"},
        {*with_text, "pixel_values"},
    ]
    if main == "input_ids":
        choices.insert(0, {"input_ids", "attention_mask"} & set(known))
    tried = []
    for chosen in choices:
        for more in ({"decoder_input_ids"} & set(known), set(), {"bbox"} & set(known)):
            names = {n for n in chosen | more if n in known and n in offers}
            if names and names not in tried:
                tried.append(names)
                batch: dict[str, Any] = {n: offers[n] for n in offers if n in names}
                if main == "input_features" and "input_features" in names:
                    yield {**batch, "input_features": offers["input_features"].transpose(1, 2).contiguous()}
                    frames = 2 * (getattr(audio, "max_source_positions", 64) or 64)
                    batch["input_features"] = torch.randn(BATCH, bins, frames, generator=generator)
                yield batch


def with_labels(model: nn.Module, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch with each kind of labels that heads take, and without labels."""
    if "labels" in inspect.signature(model.forward).parameters:
        for name in ("decoder_input_ids", "input_ids"):
            if name in batch:
                without = {k: v for k, v in batch.items() if k != "decoder_input_ids"}
                yield {**(without if name == "decoder_input_ids" else batch), "labels": batch[name].clone()}
        yield {**batch, "labels": torch.tensor([0, 1])}
        yield {**batch, "labels": batch.get("input_ids", torch.zeros(BATCH, LENGTH, dtype=torch.long)) % 2}
    yield batch


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's own loss, or the mean square of all its floating-point outputs."""
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(3)
    outputs = model(**{k: v.clone() for k, v in batch.items()})
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.sum()
    values = outputs.values() if hasattr(outputs, "values") else outputs if isinstance(outputs, tuple) else [outputs]
    parts = [
        v.float().square().mean() for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad
    ]
    if not parts:
        raise ValueError("no output with a gradient")
    return torch.stack(parts).sum()


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step, as plain tensors."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach().clone(), {
        n: (g.dequantize() if hasattr(g, "dequantize") and type(g) is not Tensor else g).clone()
        for n, g in grads.items()
    }


def repeatable(model: nn.Module) -> tuple[dict[str, Any], tuple[Tensor, dict[str, Tensor]]]:
    """A batch on which two steps of the plain model give the same finite gradients, and the first of these steps."""
    problem: Exception | None = None
    for inputs_of in inputs(model):
        for batch in with_labels(model, inputs_of):
            try:
                first = step(model, batch)
                second = step(model, batch)
            except Exception as e:
                problem = problem or e
                continue
            finite = all(g.isfinite().all() for g in first[1].values()) and first[0].isfinite()
            if not first[1] or not finite:
                problem = ValueError("no finite gradients")
            elif not torch.equal(first[0], second[0]) or any(
                not torch.equal(g, second[1][n]) for n, g in first[1].items()
            ):
                problem = ValueError("the plain model's step is not repeatable")
            else:
                return batch, first
    raise problem or ValueError("no inputs")


def compare(plain: tuple[Tensor, dict[str, Tensor]], ours: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
    """ "bitwise", "close" or "different", with the largest difference relative to the norm of its gradient.

    A gradient's norm counts as at least 1/1000 of the largest, because those of key biases are rounding noise.
    """
    (loss, grads), (our_loss, our_grads) = plain, ours
    if grads.keys() != our_grads.keys():
        return {"verdict": "different", "where": f"gradients of {sorted(grads.keys() ^ our_grads.keys())[:3]}"}
    if torch.equal(loss, our_loss) and all(torch.equal(g, our_grads[n]) for n, g in grads.items()):
        return {"verdict": "bitwise", "error": 0.0}
    largest = max(float(g.double().norm()) for g in grads.values())
    errors = {
        n: float((our_grads[n].double() - g.double()).norm()) / max(float(g.double().norm()), largest / 1000, 1e-30)
        for n, g in grads.items()
    }
    errors["loss"] = abs(float(our_loss) - float(loss)) / max(abs(float(loss)), 1e-30)
    where = max(errors, key=lambda n: errors[n] if math.isfinite(errors[n]) else math.inf)
    worst = errors[where]
    return {"verdict": "close" if worst <= CLOSE else "different", "error": worst, "where": where}


def examine(class_name: str, model_type: str, attentions: Sequence[str]) -> dict[str, Any]:
    """The record of a class: verdicts by attention and method, or the reason why it could not be built."""
    record: dict[str, Any] = {"class": class_name, "type": model_type, "runs": []}
    for attention in attentions:
        try:
            plain = build(class_name, model_type, attention)
            batch, reference = repeatable(plain)
        except Exception as e:
            record.setdefault("not_built", {})[attention] = f"{type(e).__name__}: {str(e)[:300]}"
            continue
        for method in METHODS:
            run: dict[str, Any] = {"attention": attention, "method": method}
            try:
                ours = scaled(build(class_name, model_type, attention), method=method)
                run |= compare(reference, step(ours, batch))
                run["fallbacks"] = sorted(fallbacks(ours))
            except LpconvError as e:
                run |= {"verdict": "refused", "reason": str(e)[:400]}
            except Exception as e:
                frames = traceback.extract_tb(e.__traceback__)[-3:]
                place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
                run |= {"verdict": "failed", "reason": f"{type(e).__name__}: {str(e)[:300]} at {place}"}
            record["runs"].append(run)
    return record


def start_examining(class_name: str, model_type: str, attentions: Sequence[str], out: Path) -> int:
    """Fork a process that examines one class and writes the record to `out`; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            record = examine(class_name, model_type, attentions)
        out.write_text(json.dumps(record))
    except BaseException as e:
        out.write_text(
            json.dumps({"class": class_name, "type": model_type, "runs": [], "not_built": {"any": repr(e)[:300]}})
        )
    os._exit(0)


def sweep(chosen: dict[str, str], attentions: Sequence[str], folder: Path, workers: int) -> list[dict[str, Any]]:
    """The records of all classes, each from its own process, which is killed after a minute."""
    importlib.import_module("transformers.models.bert.modeling_bert")  # or each forked process would import its parts
    waiting, running, records = list(chosen.items()), {}, []
    while waiting or running:
        while waiting and len(running) < workers:
            name, model_type = waiting.pop(0)
            child = start_examining(name, model_type, attentions, folder / f"{name}.json")
            running[child] = (name, model_type, time.monotonic())
        time.sleep(0.02)
        for child, (name, model_type, begun) in list(running.items()):
            if time.monotonic() - begun > PATIENCE_S:
                os.kill(child, signal.SIGKILL)
            if os.waitpid(child, os.WNOHANG)[0]:
                del running[child]
                path = folder / f"{name}.json"
                not_built = {"any": "ended by a signal or timeout"}
                ended = {"class": name, "type": model_type, "runs": [], "not_built": not_built}
                records.append(json.loads(path.read_text()) if path.exists() else ended)
                if sys.stderr.isatty() or len(records) % 50 == 0:
                    print(f"{len(records)} of {len(chosen)}", file=sys.stderr)
    return sorted(records, key=lambda r: (r["type"], r["class"]))


def summary(records: list[dict[str, Any]]) -> dict[str, int]:
    """Number of runs by attention, method and verdict, and number of classes, all and built."""
    counts = Counter(f"{r['attention']} {r['method']} {r['verdict']}" for c in records for r in c["runs"])
    counts["classes"], counts["built"] = len(records), sum(bool(c["runs"]) for c in records)
    return dict(sorted(counts.items()))


def main() -> None:
    parser = common.parser(__doc__, work="where each class leaves its record")
    parser.add_argument("--only", nargs="*", help="class names or model types")
    parser.add_argument("--one-per-type", action="store_true", help="one class for each model type")
    parser.add_argument("--resume", action="store_true", help="keep what --out has of classes that were built")
    parser.add_argument("--attention", nargs="+", default=["eager", "sdpa"])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = {
        n: t
        for n, t in (one_per_type() if args.one_per_type else classes()).items()
        if not args.only or n in args.only or t in args.only
    }
    transformers.logging.set_verbosity_error()
    known = common.load(args.out)["records"] if args.resume else []
    known = [r for r in known if r["runs"] and all(run["verdict"] != "failed" for run in r["runs"])]
    missing = {n: t for n, t in chosen.items() if n not in {r["class"] for r in known}}
    with common.work_folder(args.work) as folder:
        examined = sweep(missing, args.attention, folder, args.workers)
    records = sorted([*known, *examined], key=lambda r: (r["type"], r["class"]))
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "summary": summary(records)}
    print(json.dumps(head["summary"], indent=1))
    common.save({**head, "records": records}, args.out)
    for record in records:
        for run in record["runs"]:
            if run["verdict"] in ("different", "failed"):
                print(record["class"], json.dumps(run))


if __name__ == "__main__":
    main()
