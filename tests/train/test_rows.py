"""A sharded run opens the rows of each rank alone: what the whole model gives, bit for bit, in its share of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from lpconv.convert.run import convert
from lpconv.init.options import InitOptions
from lpconv.init.run import init
from lpconv.plan.options import ConvertOptions
from tests.helpers.foreign_files import make_foreign
from tests.helpers.ranks import on_ranks
from tests.train import rows_worker as worker

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

_SMALL: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
_LLAMA: dict[str, Any] = _SMALL | {"intermediate_size": 9, "num_key_value_heads": 2, "max_position_embeddings": 16}
_SEQ2SEQ: dict[str, Any] = {"d_model": 24, "vocab_size": 61, "encoder_layers": 1, "decoder_layers": 1}
# Vocabularies and widths of which 3 ranks get unequal rows, or the last one none.
MODELS: dict[str, tuple[Any, Any, torch.dtype]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA, pad_token_id=0), torch.float32),
    "tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True, pad_token_id=0), torch.bfloat16),
    "wide": (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA | {"hidden_size": 128, "intermediate_size": 256}),
             torch.bfloat16),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=61, n_positions=16),
             torch.float32),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**_LLAMA, num_local_experts=4), torch.bfloat16),
    "pegasus": (hf.PegasusForConditionalGeneration,
                hf.PegasusConfig(**_SEQ2SEQ, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=9,
                                 decoder_ffn_dim=9, max_position_embeddings=16), torch.float32),
    "hrm": (hf.HrmTextForCausalLM, hf.HrmTextConfig(**_LLAMA), torch.float32),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**_SMALL, intermediate_size=9), torch.float32),
}  # fmt: skip
CONVERTED = {
    "unit-e4m3fn": ConvertOptions(method="unit", format="e4m3fn"),
    "scalify-fp16": ConvertOptions(method="scalify", format="fp16"),
    "collage-bf16": ConvertOptions(method="collage", format="bf16"),
}
FOREIGN = ("fp8", "gptq", "awq")
OPENED = [
    ("llama", "clm", None), ("tied", "clm", None), ("gpt2", "clm", None), ("mixtral", "clm", None),
    ("pegasus", "seq2seq", None), ("bert", "mlm", None), ("bert", "classification", 5), ("fresh", "clm", None),
    *((name, "clm", None) for name in (*CONVERTED, *FOREIGN)),
]  # fmt: skip
TRAINED = {
    "fp32": ("tied", {"precision": "fp32"}),
    "amp-bf16": ("llama", {"recipe": "amp-bf16"}),
    "mpt-fp8": ("llama", {"recipe": "mpt-fp8"}),
    "bf16": ("llama", {"recipe": "bf16"}),
    "collage-bf16, tied": ("tied", {"recipe": "collage-bf16"}),
    "collage-bf16 of its own": ("collage-bf16", {"recipe": "collage-bf16"}),
    "unit-fp8": ("tied", {"recipe": "unit-fp8"}),
    "unit-fp8 by codes": ("unit-e4m3fn", {"recipe": "unit-fp8", "operand_scale": "static"}),
    "unit-fp8-collage": ("llama", {"recipe": "unit-fp8-collage"}),
    "scalify-fp8": ("llama", {"recipe": "scalify-fp8"}),
    "scalify-fp16": ("scalify-fp16", {"method": "scalify", "precision": "fp16", "optimizer": "fp16-state"}),
    "adaptive-fp16": ("llama", {"recipe": "adaptive-fp16"}),
    "native-fp8": ("fresh", {"recipe": "native-fp8"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, (model_class, config, dtype) in MODELS.items():
        torch.manual_seed(0)
        model_class(config).to(dtype).save_pretrained(folder / name)
    init("demo", folder / "fresh", InitOptions(reinit=True))
    for name, options in CONVERTED.items():
        convert(str(folder / "llama"), folder / name, options)
    for layout in FOREIGN:
        make_foreign(layout, folder / "wide", folder / layout)
    return folder


def test_rows_are_those_of_the_whole_model(folder: Path) -> None:
    """Whatever transformers renames, stacks, joins, ties, freezes or draws; buffers are whole."""
    assert on_ranks(3, worker.opened_unlike, folder, OPENED) == {name: [] for name, _, _ in OPENED}


def test_what_transformers_takes_apart_is_read_whole_and_named(folder: Path) -> None:
    """Queries, keys and values are one matrix in these files."""
    found = on_ranks(2, worker.opened_unlike, folder, [("hrm", "clm", None)])["hrm"]
    assert "model.L_module.layers.0.self_attn.q_proj.weight" in {name.partition(":")[0] for name in found}
    assert all("_proj.weight: read" in name for name in found)


def test_activations_are_counted_without_the_parameters_that_were_gathered(folder: Path) -> None:
    found = on_ranks(3, worker.saved, folder, ["llama", "tied", "gpt2"])
    assert all(by_rows == whole for whole, by_rows in found.values()), found


def test_runs_begun_from_rows_are_those_begun_from_the_whole_model(folder: Path) -> None:
    assert on_ranks(3, worker.trained_unlike, folder, TRAINED) == {name: [] for name in TRAINED}


def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    """Of 4 ranks each adds a quarter and what is being read, where opening whole adds everything."""
    config = hf.LlamaConfig(**_LLAMA | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6})
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in hf.LlamaForCausalLM(config).parameters())
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    found = on_ranks(4, worker.peaks, tmp_path, "model")
    assert max(found["rows"]) < 0.6 * size
    assert min(found["whole"]) > size


def test_ranks_look_together_for_what_only_one_of_them_has(tmp_path: Path) -> None:
    assert on_ranks(2, worker.nonfinite_on_one, tmp_path) == [("0", "forward"), None]
