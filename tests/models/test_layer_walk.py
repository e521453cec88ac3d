"""Layers of models that run one at a time: the same states as the model has inside."""

import threading
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.models.layer_walk import LayerRun, LayerWalk

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ONE_AND_TWO = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_VISION = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
# Masks and positions that differ by layer, arguments by position, states in tuples, experts, encoders, a part for text
# next to more layers for images, decoders after encoders, a bias that the first layer passes on.
MODELS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gemma3_text": {**_GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": _WINDOWS},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 96, "n_positions": 64},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 3, "vocab_size": 96},
    "mixtral": {**_GROUPED, "num_local_experts": 3},
    "bert": _SIZES,
    "deberta-v2": {**_SIZES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    "gemma3": {
        "text_config": {**_GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": _WINDOWS},
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 8},
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 2, "vocab_size": 96},
    "bart": {**_ONE_AND_TWO, "d_model": 32, "vocab_size": 96, "max_position_embeddings": 64},
}  # fmt: skip


def model_of(kind: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    model = transformers.AutoModel.from_config(config).eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def after_last_layer(model: Any, ids: Tensor, last: Any) -> Tensor:
    """What the last layer makes of some windows when the whole model runs."""
    found: list[Any] = []
    hook = last.register_forward_hook(lambda _, __, made: found.append(made))
    further = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **further)
    hook.remove()
    made: Tensor = found[0][0] if isinstance(found[0], tuple) else found[0]
    return made


def advance(walk: LayerWalk, index: int) -> None:
    with LayerRun(walk, index, (), held=1) as run:
        assert not run.next_matrices()
        run.finish()


@pytest.mark.parametrize("kind", MODELS)
def test_states_are_those_of_the_whole_model(kind: str) -> None:
    model, ids = model_of(kind, MODELS[kind]), torch.randint(5, 90, (5, 12), generator=torch.manual_seed(1))
    walk = LayerWalk(model, ids, at_once=2)
    assert len(walk.layers) == 3
    for index in range(3):
        advance(walk, index)
    states = torch.cat([batch.state for batch in walk.batches])
    torch.testing.assert_close(states, after_last_layer(model, ids, walk.layers[-1]), rtol=0, atol=1e-6)


def test_a_layer_can_run_again_before_the_states_pass_it() -> None:
    model, ids = model_of("llama", MODELS["llama"]), torch.arange(5, 29).view(2, 12)
    walk = LayerWalk(model, ids, at_once=2)
    (batch,) = walk.batches
    first = walk.run(0, batch)
    assert torch.equal(first, walk.run(0, batch))
    advance(walk, 0)
    assert torch.equal(batch.state, first)


def test_the_model_runs_as_before_afterwards() -> None:
    model, ids = model_of("llama", MODELS["llama"]), torch.arange(5, 29).view(2, 12)
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
        LayerWalk(model, ids, at_once=1)
        assert torch.equal(model(input_ids=ids).last_hidden_state, before)


def test_a_layer_that_runs_several_times_is_refused() -> None:
    model = model_of("albert", {**_SIZES, "embedding_size": 16})
    with pytest.raises(UnsupportedError, match="`AlbertModel`"):
        LayerWalk(model, torch.arange(5, 29).view(2, 12), at_once=2)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_in_a_layer_ends_the_run_and_its_threads(error: type[BaseException]) -> None:
    model, ids = model_of("llama", MODELS["llama"]), torch.arange(5, 29).view(2, 12)
    walk, before = LayerWalk(model, ids, at_once=1), threading.active_count()

    def fail(*_: object) -> None:
        raise error

    walk.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error), LayerRun(walk, 0, (), held=1) as run:
        run.finish()
    assert threading.active_count() == before
