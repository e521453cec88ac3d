"""A fuzzer of checkpoints: odd but real storage of small models, read by lpconv and by transformers.

A case is a model class, the way its weights are stored, some quirks of real files, and a conversion; all of it follows
from a seed. transformers' own loading of the source is the oracle: the exact conversion must open in transformers with
every parameter bit for bit, a rounded one with every parameter within the bound of its bits, and `restore` must give
the source's bits back. Otherwise the checkpoint must be refused with a message, before anything is published. A failing
case is shrunk: quirks are left out while it still fails.

    python -m tests.faults.odd_checkpoints --long --seed 2000   # hours; each seed is a case
"""

import argparse
import io
import json
import logging
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import lpconv.hf  # noqa: F401  # registers the layout with transformers
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.inspect.values import inspect_with_statistics
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output

T = transformers
_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_WIDE = _TEXT | {"intermediate_size": 64}
_SEQ2SEQ = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
CLASSES: Mapping[str, Callable[[], Any]] = {
    "LlamaForCausalLM": lambda: T.LlamaConfig(**_WIDE),
    "LlamaForCausalLM tied": lambda: T.LlamaConfig(**_WIDE, tie_word_embeddings=True),
    "Gemma2ForCausalLM": lambda: T.Gemma2Config(**_WIDE, head_dim=16, num_key_value_heads=2),
    "Qwen2ForCausalLM": lambda: T.Qwen2Config(**_WIDE, num_key_value_heads=1),
    "MixtralForCausalLM": lambda: T.MixtralConfig(**_WIDE, num_key_value_heads=2, num_local_experts=3),
    "GPT2LMHeadModel": lambda: T.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32),
    "GPTNeoXForCausalLM": lambda: T.GPTNeoXConfig(**_WIDE),
    "OPTForCausalLM": lambda: T.OPTConfig(**_TEXT, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32),
    "BertForMaskedLM": lambda: T.BertConfig(**_WIDE),
    "BertForSequenceClassification": lambda: T.BertConfig(**_WIDE, num_labels=3),
    "AlbertForMaskedLM": lambda: T.AlbertConfig(**_WIDE, embedding_size=16),
    "BartForConditionalGeneration": lambda: T.BartConfig(**_SEQ2SEQ),
    "T5ForConditionalGeneration": lambda: T.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    ),
    "ViTForImageClassification": lambda: T.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    ),
}
CONVERSIONS: Mapping[str, Mapping[str, Any]] = {
    "exact": {"format": "fp32"},
    "fp16": {"format": "fp16"},
    "e4m3fn": {"format": "e4m3fn", "granularity": "row"},
    "int4": {"format": "int4", "granularity": "group:16", "scale": "exact"},
    "collage": {"method": "collage"},
    "compressed fp8": {
        "format": "e4m3fn", "layout": "compressed-tensors", "granularity": "row", "scale": "exact",
    },
    "compressed int4": {
        "format": "int4", "layout": "compressed-tensors", "granularity": "group:32", "scale": "exact",
    },
}  # fmt: skip
_PARTS = ("weight_scale", "weight_shape")  # that compressed-tensors keeps next to decoded weights
_LEAST_DB = {"exact": 200.0, "fp16": 55.0, "collage": 40.0, "e4m3fn": 20.0, "compressed fp8": 20.0, "int4": 8.0,
             "compressed int4": 8.0}  # fmt: skip


@dataclass
class Files:
    """A checkpoint before it is written: tensors, config, and more files of weights and of text by name."""

    state: dict[str, Tensor]
    config: dict[str, Any]
    rng: random.Random
    kind: str
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def pick(self, ndim: int = 2) -> str:
        return self.rng.choice(sorted(n for n, x in self.state.items() if x.ndim == ndim))

    def change(self, name: str, to: Callable[[Tensor], Tensor]) -> None:
        self.state[name] = to(self.state[name])

    def rename(self, to: Callable[[str], str]) -> None:
        self.state = {to(n): x for n, x in self.state.items()}


def _same_layers(f: Files) -> None:
    """All tensors of layer 1 share the memory of layer 0."""
    for name in [n for n in f.state if ".1." in n]:
        twin = name.replace(".1.", ".0.", 1)
        if twin in f.state and f.state[twin].shape == f.state[name].shape:
            f.state[name] = f.state[twin]


def _transposed_alias(f: Files) -> None:
    """A square matrix is the transpose of another one, in the same memory."""
    square = [n for n, x in f.state.items() if x.ndim == 2 and x.shape[0] == x.shape[1]]
    if len(square) > 1:
        a, b = f.rng.sample(sorted(square), 2)
        f.state[b] = f.state[a].t()


def _head_equals_embedding(f: Files) -> None:
    heads = [n for n in f.state if n.endswith(("lm_head.weight", "embed_out.weight", "decoder.weight"))]
    for head in heads:
        same = [n for n, x in f.state.items() if "embed" in n and x.shape == f.state[head].shape and n != head]
        if same:
            f.state[head] = f.state[same[0]].clone()


def _without_prefix(f: Files) -> None:
    """Names of the base model, as in old files."""
    prefixes = Counter(n.split(".")[0] for n in f.state)
    prefix = prefixes.most_common(1)[0][0] + "."
    if not any(n.removeprefix(prefix) in f.state for n in f.state if n.startswith(prefix)):
        f.rename(lambda name: name.removeprefix(prefix))


def _old_buffers(f: Files) -> None:
    for name in [n for n in f.state if n.endswith(("c_attn.weight", "q_proj.weight", "query.weight"))]:
        stem = name.rpartition(".")[0].rpartition(".")[0]
        f.state[f"{stem}.masked_bias"] = torch.tensor(-1e4)
        f.state[f"{stem}.rotary_emb.inv_freq"] = torch.linspace(0, 1, 8)


def _index(weight_map: Mapping[str, str]) -> str:
    return json.dumps({"metadata": {}, "weight_map": weight_map})


def _redrawn(x: Tensor) -> Tensor:
    return torch.randn_like(x.float()).to(x.dtype) if x.is_floating_point() else x


def _with_nan(x: Tensor) -> Tensor:
    return torch.cat((x.new_tensor([float("nan")]), x.flatten()[1:])).view(x.shape)


def _with_special_numbers(x: Tensor) -> Tensor:
    special = [-0.0, torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).smallest_normal]
    return torch.cat((x.new_tensor(special), x.flatten()[3:])).view(x.shape)


_STRAY = ("mtp.safetensors", "adapter_model.safetensors", "model.fp16.safetensors")
_DTYPES = ("bfloat16", "float16", "float32", "auto", "torch.bfloat16", None)
_INDEX = "model.safetensors.index.json"
_ONE_SHARD = "model-00001-of-00001.safetensors"
QUIRKS: Mapping[str, Callable[[Files], object]] = {
    "same layers": _same_layers,
    "transposed alias": _transposed_alias,
    "head equals embedding": _head_equals_embedding,
    "silent about ties": lambda f: f.config.pop("tie_word_embeddings", None),
    "no architectures": lambda f: f.config.pop("architectures", None),
    "without prefix": _without_prefix,
    "old buffers": _old_buffers,
    "another head": lambda f: f.state.update(
        {"qa_outputs.weight": torch.randn(2, 32), "qa_outputs.bias": torch.zeros(2)}
    ),
    # Other values in a file that transformers prefers, or that it does not read.
    "second checkpoint": lambda f: f.weights.update(
        {f.rng.choice(["model.safetensors", "pytorch_model.bin"]): {n: _redrawn(x) for n, x in f.state.items()}}
    ),
    "stray safetensors": lambda f: f.weights.update({f.rng.choice(_STRAY): {"mtp.weight": torch.randn(3, 3)}}),
    "stale index": lambda f: f.texts.update({_INDEX: _index(dict.fromkeys(f.state, _ONE_SHARD))}),
    "adapter config": lambda f: f.texts.update({"adapter_config.json": '{"peft_type": "LORA"}'}),
    "odd side files": lambda f: f.texts.update({"notes.txt": "a note", "generation_config.json": "{}"}),
    "one wide": lambda f: f.change(f.pick(), Tensor.double),
    "one half": lambda f: f.change(f.pick(f.rng.choice([1, 2])), Tensor.half),
    "zeros": lambda f: f.change(f.pick(), torch.zeros_like),
    "one nan": lambda f: f.change(f.pick(), _with_nan),
    "special numbers": lambda f: f.change(f.pick(), _with_special_numbers),
    "config dtype": lambda f: f.config.update(dtype=f.rng.choice(_DTYPES)),
    "legacy dtype": lambda f: f.config.update(torch_dtype=f.config.pop("dtype", "float32")),
    "missing weight": lambda f: f.state.pop(f.pick()),
    "missing vector": lambda f: f.state.pop(f.pick(1)),
    "compiled prefix": lambda f: f.rename(lambda name: f"_orig_mod.{name}"),
    "stale quantization": lambda f: f.config.update(
        quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
}
KINDS = ("safetensors", "shards", "bin", "bin shards", "old bin", "strided bin")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint and one conversion of it."""

    seed: int
    cls: str
    dtype: torch.dtype
    kind: str
    quirks: tuple[str, ...]
    conversion: str

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        return cls(
            seed=seed,
            cls=rng.choice(sorted(CLASSES)),
            dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
            kind=rng.choice(KINDS),
            quirks=tuple(rng.sample(sorted(QUIRKS), rng.choice([0, 1, 1, 2, 2, 3]))),
            conversion=rng.choice(sorted(CONVERSIONS)),
        )

    def __str__(self) -> str:
        quirks = ", ".join(self.quirks) or "no quirks"
        return f"{self.seed}: {self.cls}, {self.dtype}, {self.kind}, {self.conversion}: {quirks}"


def _write(directory: Path, state: Mapping[str, Tensor], name: str) -> None:
    if name.endswith(".bin"):
        torch.save(dict(state), directory / name)
    else:
        save_file({n: x.clone().contiguous() for n, x in state.items()}, directory / name, metadata={"format": "pt"})


def write_case(case: Case, directory: Path) -> None:
    """Write the checkpoint of a case."""
    torch.manual_seed(case.seed)
    config = CLASSES[case.cls]()
    model = getattr(T, case.cls.split()[0])(config).to(case.dtype)
    model.config.architectures = [case.cls.split()[0]]
    state = {n: x.detach() for n, x in model.state_dict().items()}
    if not case.kind.endswith("bin") and "bin" not in case.kind:  # save_pretrained leaves out what is tied
        kept = model.all_tied_weights_keys if random.Random(case.seed).random() < 0.7 else {}
        state = {n: x for n, x in state.items() if n not in kept}
    f = Files(
        state=state,
        config=json.loads(model.config.to_json_string(use_diff=False)),
        rng=random.Random(case.seed),
        kind=case.kind,
    )
    for quirk in case.quirks:
        QUIRKS[quirk](f)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(f.config))
    _write_weights(f, directory)
    for name, weights in f.weights.items():
        _write(directory, weights, name)
    for name, text in f.texts.items():
        (directory / name).write_text(text)


def _write_weights(f: Files, directory: Path) -> None:
    stem, end = ("pytorch_model", ".bin") if "bin" in f.kind else ("model", ".safetensors")
    if not f.kind.endswith("shards"):
        if f.kind == "old bin":
            torch.save(f.state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
            return
        if f.kind == "strided bin":
            f.state = {n: x.t().contiguous().t() if x.ndim == 2 and len(n) % 2 else x for n, x in f.state.items()}
        _write(directory, f.state, f"{stem}{end}")
        return
    names, weight_map = list(f.state), dict[str, str]()
    for i in range(2):
        part = {n: f.state[n] for n in names[i::2]}
        file = f"{stem}-{i + 1:05d}-of-00002{end}"
        _write(directory, part, file)
        weight_map |= dict.fromkeys(part, file)
    (directory / f"{stem}{end}.index.json").write_text(_index(weight_map))


def opened_by_transformers(directory: Path) -> tuple[dict[str, Tensor], set[str]] | None:
    """Parameters in fp32 as transformers reads them, and names without data; None if it cannot open the folder."""
    config = json.loads((directory / "config.json").read_text())
    cls = getattr(T, (config.get("architectures") or ["AutoModel"])[0])
    try:
        model, info = cls.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    except Exception:
        return None
    if getattr(model, "hf_quantizer", None) is not None and hasattr(model.hf_quantizer, "compressor"):
        model.hf_quantizer.compressor.decompress_model(model)
    parameters = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    return {n: p for n, p in parameters.items() if not n.endswith(_PARTS)}, set(info["missing_keys"])


def check_case(case: Case, folder: Path) -> str:
    """ "equal", or "refused: ..." with the message. Raises AssertionError for a difference."""
    source, output = folder / "source", folder / "output"
    write_case(case, source)
    wanted = opened_by_transformers(source)
    options = ConvertOptions(allow_missing=True, verify="auto", **CONVERSIONS[case.conversion])
    try:
        result = convert(source, output, options)
    except LpconvError as e:
        assert not output.exists(), "refused, but published"
        return f"refused: {e.message.replace(str(folder), '')}"
    assert wanted is not None, "published, although transformers cannot open the source"
    got = opened_by_transformers(output)
    assert got is not None, "published, although transformers cannot open the output"
    _compare(wanted, got, _LEAST_DB[case.conversion])
    if case.conversion == "exact" and result.verify.logits and result.verify.logits.skipped is None:
        assert (result.verify.logits.rel_error or 0.0) < 1e-5, "outputs of equal weights differ"
    checked = verify_output(output, VerifyOptions(against=str(source), level="weights"), progress=Silent())
    assert checked.passed, f"verify fails: {checked.problems}"
    if case.conversion in ("exact", "collage"):
        restore(output, folder / "restored", force=False, progress=Silent())
        again = opened_by_transformers(folder / "restored")
        assert again is not None, "the restored checkpoint cannot be opened"
        _compare(wanted, again, 200.0 if case.conversion == "exact" else 40.0)
    if "bin" not in case.kind:
        inspect_with_statistics(source, Silent())
    return "equal"


def _compare(wanted: Any, got: Any, least_db: float) -> None:
    (before, lacking), (after, lost) = wanted, got
    assert before.keys() == after.keys(), f"other parameters: {sorted(before.keys() ^ after.keys())[:3]}"
    assert lost <= lacking, f"lost weights: {sorted(lost - lacking)[:3]}"
    for name in before.keys() - lacking:
        x, y = before[name], after[name]
        assert x.shape == y.shape, f"`{name}` has shape {tuple(y.shape)}, not {tuple(x.shape)}"
        assert torch.equal(x.isnan(), y.isnan()), f"`{name}`: NaN in other places"
        signal, noise = x.nan_to_num().double(), (y - x).nan_to_num().double()
        if not noise.any():
            continue
        db = 10 * float(torch.log10(signal.square().sum() / noise.square().sum()))
        assert db >= least_db, f"`{name}`: {db:.1f} dB"


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    T.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # progress bars
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def run_case(case: Case) -> str:
    """The outcome of a case: "equal", "refused: ...", or "DIFFERS: ..." for a difference or a bug."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            return check_case(case, Path(folder))
        except AssertionError as e:
            return f"DIFFERS: {e}"
        except Exception:
            return f"DIFFERS: {traceback.format_exc(limit=-3)}"


def shrunk(case: Case) -> Case:
    """The case with as few quirks as still differ."""
    for quirk in case.quirks:
        smaller = replace(case, quirks=tuple(q for q in case.quirks if q != quirk))
        if run_case(smaller).startswith("DIFFERS"):
            return shrunk(smaller)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="2,000 cases instead of 200")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    outcomes, failures = Counter[str](), list[str]()
    for seed in range(asked.seed, asked.seed + (2000 if asked.long else 200)):
        outcome = run_case(Case.drawn(seed))
        outcomes[outcome[:90] if outcome.startswith("refused") else outcome.split(":")[0]] += 1
        if outcome.startswith("DIFFERS"):
            small = shrunk(Case.drawn(seed))
            failures.append(f"{small}\n    {run_case(small)}")
            print(failures[-1], flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
