"""Calibration text that the model writes itself, for `--calibrate self`.

Text sampled from a language model has the kinds of text that it was trained on, in their proportions. Calibrating on it
needs no data, and fits the model to no single kind (Williams, Chrysostomou & Aletras 2025, arXiv 2410.17170).
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lpconv.errors import UnsupportedError
from lpconv.models.inputs import sequence_length
from lpconv.models.load import open_in_files
from lpconv.models.opening import model_errors, read_text_config
from lpconv.models.tasks import architecture
from lpconv.models.tokenizer import tokenizer_of
from lpconv.plan.job import Job
from lpconv.plan.options import CALIBRATION_TOKENS
from lpconv.progress import Progress
from lpconv.storage.partfile import write_small

_HINT = "pass a text with --calibrate FILE, or --calibrate demo for the sample text"
_SPARE = 1.1  # tokens to sample for each one to read: a text may have fewer tokens than were sampled
_CACHE_BYTES = 1 << 29  # keys and values of the sequences that are sampled together


def write_own_text(job: Job, path: Path, progress: Progress) -> None:
    """Write as much text as calibration reads, sampled from the source at temperature 1 in fp32.

    Matrices are read from the source's files for each token, so memory stays small. Raises UnsupportedError for a
    model that does not generate text, InputError if it has no tokenizer.
    """
    options, config = job.plan.options, read_text_config(job.plain, hint=_HINT)
    model_class, tokenizer = architecture(job.plain.config), tokenizer_of((job.plain,))
    if not model_class.can_generate():
        raise UnsupportedError(f"--calibrate self: `{model_class.__name__}` does not generate text", hint=_HINT)
    length = sequence_length(config, None)
    count = math.ceil(_SPARE * (options.calibration_tokens or CALIBRATION_TOKENS) / length) + 1
    texts: list[str] = []
    progress.start("writing a text", count * length, unit="steps")
    with (
        model_errors("the model cannot generate text", hint=_HINT),
        open_in_files(job.checkpoint) as (model, _),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(options.calibration_seed or 0)
        together = _together(config, length)
        for start in range(0, count, together):
            ids = _sampled(model, config, min(together, count - start), length, progress)
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    write_small(path, "\n".join(texts))


def _sampled(model: Any, config: Any, count: int, length: int, progress: Progress) -> Tensor:
    """Ids of `count` sequences of `length` tokens, each after the token that begins a text."""

    def report(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        progress.advance(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool)

    special = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((i for i in special if isinstance(i, int)), 0)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length, max_new_tokens=length,
        pad_token_id=first, eos_token_id=config.eos_token_id, use_cache=True,
    )  # fmt: skip
    starts = torch.full((count, 1), first)
    found: Tensor = model.generate(
        starts, attention_mask=torch.ones_like(starts), generation_config=settings, stopping_criteria=[report]
    )
    return found[:, 1:]


def _together(config: Any, length: int) -> int:
    """The number of sequences to sample at once."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    values: int = 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size
    return max(_CACHE_BYTES // (4 * length * values), 1)
