"""Compare the outputs of two models on the same inputs: short ones, or every token of a text.

*Short inputs* are tokens of the included text for text models with a tokenizer, else random with a fixed seed: token
ids, or noise for images and sound. One model at a time
is in memory. If the checkpoint has no weights for the head of the architecture, the hidden states of the base model are
compared instead, because outputs of a random head would be meaningless.

*On a text* the result is KL both ways, top-1 agreement and perplexities. One model at a time runs in fp32, with its
matrices read from their files during multiplication (`models/load.py`, `open_in_files`), so memory holds only
activations. First the bodies run, on as many windows at once as memory allows, and produce the last hidden state of
every token; then the heads compute the logits of both for a few tokens at a time, because logits of a whole text would
take as much memory as a model. Inputs of layers are rounded as the readers of the result round them
(`models/rounded_inputs.py`), so the figures are those of the model that is served. On some tokens, every layer is also
computed with the weight of the source from the same inputs, which shows where errors enter.

Letters in shapes: N windows, L tokens per window, T tokens at a time, H hidden size, V vocabulary.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lpconv.data import demo_text
from lpconv.errors import InputError, ResourceError, UnsupportedError, UsageError, VerificationError
from lpconv.machine import available_memory
from lpconv.models.coded import CodedTensor, watched_products
from lpconv.models.empty import check_memory, num_parameters
from lpconv.models.inputs import describe_inputs, example_inputs, inputs_for, vocabulary_size
from lpconv.models.load import open_as_served, open_in_files
from lpconv.models.opening import model_errors, open_to_run, read_text_config, transformers_config
from lpconv.models.tasks import CLM, architecture, resolve_auto_class, task_of
from lpconv.models.tokenizer import read_tokenizer, tokenize, windows_of
from lpconv.plan.memory import AT_ONCE, window_bytes
from lpconv.plan.provenance import sqnr_db
from lpconv.progress import Progress, quiet_transformers
from lpconv.report.numbers import code_list
from lpconv.results import LogitsCheck
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.student import estimate_mean
from lpconv.summed import Summed, joined

_OUTPUTS = ("logits", "last_hidden_state", "logits_per_image")
_UNLIKE, _REPORT = "the source can be opened but the output cannot", "please report this, or use another --layout"
_COPIES_IN_MEMORY = 2  # the model, and the tensors being loaded into it
_HINT = "leave --data out to compare weights only"
_HEAD_BYTES, _EXACT = 2**26, 16  # memory for the logits of a head; tokens whose logits are compared in fp64 at a time
_SAMPLED = 64  # tokens for the errors of a layer: their SQNR is on average 0.2 dB from that of 512 tokens
_FIXED_BYTES = 150_000_000  # rows of weights, and memory that libraries take at run time


def check_model(checkpoint: Checkpoint) -> None:
    """Raise ResourceError if the model does not fit in memory, unless its own code determines its size."""
    if "auto_map" not in checkpoint.config:
        check_memory(num_parameters(checkpoint), copies=_COPIES_IN_MEMORY, what="running the model")


def check_inputs(checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Raise an error, from the config alone, if the model will not open or has no inputs that lpconv can make."""
    if trust_remote_code and "auto_map" in checkpoint.config:
        return  # only the model's own code can tell
    cls = architecture(checkpoint.config)
    config = transformers_config(checkpoint, hint="use --verify weights")
    inputs_for(resolve_auto_class(cls, config), config)


def check_logits(source: Openable, output: Path, *, trust_remote_code: bool, in_files: bool = False) -> LogitsCheck:
    """Compare the outputs of both models in fp32 on the CPU, the result's as it is served.

    Raises UnsupportedError if no inputs can be made for the model.

    With `in_files` the matrices are read from their files as needed, so memory holds only activations.
    """
    source = Checkpoint.open(source)
    # Both directories are local; the flag decides whether their own Python files may run.
    options = {"trust_remote_code": trust_remote_code}
    with quiet_transformers():
        with _open_source(source, in_files=in_files, **options) as (model, missing):
            check_whole(missing, hint="use --verify weights")
            inputs, cls = verification_inputs(model, source.directory), type(model)
            wanted = outputs_of(model, inputs.tensors)
        del model
        with (
            model_errors(_UNLIKE, hint=_REPORT, error=VerificationError),
            open_as_served(output, in_files=in_files, model_class=cls, **options) as model,
        ):
            model.config.use_cache = False  # like the source's, because some models cannot run with a cache
            got, rounded = outputs_of(model, inputs.tensors), rounding_words(model)
    check = compare_outputs(wanted, got, cls.__name__, inputs.words, is_text=inputs.is_text)
    return replace(check, rounded_inputs=rounded)


@contextmanager
def _open_source(source: Checkpoint, *, in_files: bool, **options: bool) -> Iterator[tuple[Any, tuple[str, ...]]]:
    if in_files:
        with open_in_files(source, **options) as opened:
            yield opened
    else:
        whole = open_to_run(source, **options)
        yield whole.model, whole.missing


def rounding_words(model: Any) -> str | None:
    """To what the inputs of a model's layers are rounded, in words; None if they are not."""
    rounded = {p.inputs.words for p in model.parameters() if isinstance(p, CodedTensor) and p.inputs}
    return " or ".join(sorted(rounded)) or None


@dataclass(frozen=True, kw_only=True)
class VerificationInputs:
    """Inputs for comparing the outputs of two models, with words for the record. `is_text`: tokens of a real text."""

    tensors: dict[str, Tensor]
    words: str
    is_text: bool = False


def verification_inputs(model: Any, directory: Path) -> VerificationInputs:
    """Inputs of `example_inputs`, with tokens of the included text if the model reads tokens and has a tokenizer."""
    inputs = example_inputs(model)
    ids = [name for name in ("input_ids", "decoder_input_ids") if name in inputs]
    try:
        tokenizer = read_tokenizer(directory) if ids else None
        if tokenizer is None:
            return VerificationInputs(tensors=inputs, words=describe_inputs(inputs))
        batch, length = inputs[ids[0]].shape
        words = vocabulary_size(model.config)
        windows = tokenize(demo_text("heldout"), tokenizer, seq_len=length, vocab_size=words).windows
    except (InputError, UsageError):  # the tokenizer belongs to another model
        return VerificationInputs(tensors=inputs, words=describe_inputs(inputs))
    for number, name in enumerate(ids):
        inputs[name] = windows[number * batch : (number + 1) * batch, : inputs[name].shape[1]]
    shapes = ", ".join(f"{name} {list(inputs[name].shape)}" for name in ids)
    return VerificationInputs(tensors=inputs, words=f"{shapes} of the included text", is_text=True)


def check_whole(missing: Sequence[str], *, hint: str) -> None:
    """Raise UnsupportedError if weights are missing, because outputs of random weights cannot be compared."""
    if missing:
        raise UnsupportedError(
            f"the checkpoint lacks the weights {code_list(missing)}, so its outputs would be random", hint=hint
        )


def outputs_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits in fp32, or a base model's last hidden states. Raises UnsupportedError if there are neither.

    Models that draw random numbers, such as the patches that ViTMAE masks, draw the same ones in every call.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        out = model(**inputs)
    output = next((out[k] for k in _OUTPUTS if out.get(k) is not None), None)
    if output is None:
        raise UnsupportedError(f"{type(model).__name__} returns no logits", hint="use --verify weights")
    logits: Tensor = output.float()
    return logits


def compare_outputs(
    wanted: Tensor, got: Tensor, model: str | None = None, inputs: str | None = None, *, is_text: bool = False
) -> LogitsCheck:
    """Compare the outputs of two models on the same inputs; `model` and `inputs` describe them in the record.

    Outputs of the source that could not show a difference are not compared, but the record says so.
    """
    why = _why_not_measurable(wanted)
    if why is not None:
        return LogitsCheck(skipped=f"not measurable: {why}", model_class=model, inputs=inputs)
    rows = (x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (wanted, got))
    return replace(_check_of(_compare_tokens(*rows)), model_class=model, inputs=inputs, is_text=is_text)


def _why_not_measurable(wanted: Tensor) -> str | None:
    """Why outputs of the source show nothing about a model; None if they do. Words may be masked with -inf."""
    if wanted.isnan().any() or (wanted == math.inf).any():
        return "the source's outputs are NaN or infinite"
    places = wanted.reshape(-1, wanted.shape[-1] if wanted.ndim else 1)
    if not places[torch.isfinite(places)].any():
        return "the source's outputs are all zero or infinite"
    is_constant = len(places) > 1 and torch.equal(places, places[:1].expand_as(places))
    return "the source's outputs do not depend on its inputs" if is_constant else None


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last axis in nats; what has no probability in p adds nothing."""
    return torch.where(log_p == -math.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class _TokenSums(Summed):
    """Sums over tokens.

    `num` tokens, `kl` KL of the source to the result and `back` the reverse, `same` equal top-1 choices, `error` Σ(y -
    ŷ)², `signal` Σy², `largest` |y - ŷ|, `equal` whether all bits agree; and next-token losses of result and source,
    with the `rises` from source to result one by one.
    """

    num: int = 0
    kl: float = 0.0
    back: float = 0.0
    same: int = 0
    error: float = 0.0
    signal: float = 0.0
    largest: float = joined(lambda a, b: float(np.maximum(a, b)), 0.0)  # NaN counts as the largest
    equal: bool = joined(operator.and_, True)
    num_next: int = 0
    loss: float = 0.0
    source_loss: float = 0.0
    rises: tuple[float, ...] = ()


def compare_on_text(
    model: Openable, reference: Openable, data: Path, *, seq_len: int | None, max_tokens: int, progress: Progress
) -> tuple[LogitsCheck, Mapping[str, tuple[float | None, float]]]:
    """Compare the models of two checkpoints on a text, in windows of `seq_len` tokens, `max_tokens` at most.

    Also returns the SQNR of inputs and outputs of the layers with a quantised weight, by its name. The tokenizer is the
    reference's, if it has one. Raises InputError if neither has one, UnsupportedError for models without a head over
    tokens, ResourceError if memory cannot hold the activations of one window.
    """
    ours, theirs = Checkpoint.open(model), Checkpoint.open(reference)
    config = read_text_config(ours, hint=_HINT)
    tokens, length = windows_of((theirs, ours), config, data, seq_len, max_tokens)
    at_once = _windows_per_pass(config, length)
    progress.start("running both models on the text", 3 * tokens.windows.numel(), unit="tokens")
    with (
        model_errors("the model fails on the text", hint=_HINT),
        _open_model(ours, rounds_inputs=True) as converted,
        _open_model(theirs) as source,
        torch.no_grad(),
    ):
        layers = _Layers(source)
        bodies = [_hidden_states(source, tokens.windows, at_once, progress)]
        with watched_products(layers):
            bodies.append(_hidden_states(converted, tokens.windows, at_once, progress))
        has_next = task_of(type(converted).__name__) is CLM
        total = _TokenSums()
        for ids, hidden, following in _token_slices(bodies, tokens.windows, vocabulary_size(config)):
            expected, actual = (_text_logits(m, ids, h) for m, h in zip((source, converted), hidden, strict=True))
            total += _compare_tokens(expected, actual, following if has_next else None)
            progress.advance(ids.numel())
        words = f"{data.name}, {total.num} tokens in windows of {length}"
        if not math.isfinite(total.signal) or total.signal == 0:
            raise InputError("the source's outputs on the text are not finite or all zero", hint=_HINT)
        # Tokens of a window depend on each other.
        by_window = torch.tensor(total.rises, dtype=torch.float64).view(len(tokens.windows), -1).mean(1)
        check = replace(
            _check_of(total),
            reverse_kl=total.back / total.num,
            loss_gap=estimate_mean(by_window.tolist()) if total.rises else None,
            model_class=type(converted).__name__,
            inputs="; ".join((words, *tokens.doubts)),
            is_text=True,
            rounded_inputs=rounding_words(converted),
        )
        return check, layers.sqnrs_db


class _Layers:
    """Collects errors of products with quantised weights, against products with those of the model `source`.

    `sums` are, by the weight's name: the number of tokens, the squares of inputs and of their errors, and of outputs
    and theirs.
    """

    def __init__(self, source: Any) -> None:
        self._stored = next((p.pieces[0].source for p in source.parameters() if isinstance(p, CodedTensor)), None)
        self.sums: dict[str, Tensor] = {}

    def __call__(self, x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
        first = weight.pieces[0].form
        num_left = _SAMPLED - int(self.sums.get(first.name, [0])[0])
        exact = self._twin(weight) if first.format is not None and num_left > 0 and not is_transposed else None
        if exact is None:
            return
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[:: max(len(rows) // num_left, 1)][:num_left]
        rounded = rows if weight.inputs is None else weight.inputs(rows)
        heights = [len(piece) // x.shape[-1] for piece in weight.pieces]
        outputs = (torch.split(t, heights, -1) for t in (exact.times(rows), weight.times(rounded)))
        for piece, y, z in zip(weight.pieces, *outputs, strict=True):
            squares = [float(t.double().square().sum()) for t in (rows, rows - rounded, y, y - z)]
            sums = torch.tensor([len(rows), *squares], dtype=torch.float64)
            self.sums[piece.form.name] = self.sums.get(piece.form.name, 0) + sums

    @property
    def sqnrs_db(self) -> dict[str, tuple[float | None, float]]:
        """SQNR of the inputs, None if they are not rounded, and of the outputs, by the weight's name."""
        parts = {name: sums.tolist() for name, sums in self.sums.items()}
        return {n: (sqnr_db(x, dx) if dx else None, sqnr_db(y, dy)) for n, (_, x, dx, y, dy) in parts.items()}

    def _twin(self, weight: CodedTensor) -> CodedTensor | None:
        """The source's weight in its files; None if it has none of that name and shape."""
        forms = {} if self._stored is None else self._stored.forms
        pieces = []
        for piece in weight.pieces:
            form = forms.get(piece.form.name)
            if form is None or form.shape != piece.form.shape:
                return None
            pieces.append(replace(piece, form=form, source=self._stored, parts={}))
        return CodedTensor(pieces, tuple(weight.shape), weight.dtype)


def _check_of(total: _TokenSums) -> LogitsCheck:
    return LogitsCheck(
        max_abs_diff=total.largest,
        rel_error=math.sqrt(total.error / total.signal),
        bit_equal=total.equal,
        top1_agreement=total.same / total.num,
        mean_kl=total.kl / total.num,
        perplexity=_exp(total.loss / total.num_next) if total.num_next else None,
        source_perplexity=_exp(total.source_loss / total.num_next) if total.num_next else None,
    )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@contextmanager
def _open_model(checkpoint: Checkpoint, *, rounds_inputs: bool = False) -> Iterator[Any]:
    with open_in_files(checkpoint, rounds_inputs=rounds_inputs) as (model, missing):
        check_whole(missing, hint=_HINT)
        if model.base_model is model:
            name = type(model).__name__
            raise UnsupportedError(f"`{name}` has no head, so there are no per-token outputs to compare", hint=_HINT)
        yield model


def _windows_per_pass(config: Any, length: int) -> int:
    """Number of windows per forward pass that fit into free memory."""
    needed = window_bytes(config, length)
    free = available_memory() - _FIXED_BYTES - 3 * _HEAD_BYTES
    if needed > free:
        raise ResourceError(
            f"a window of {length} tokens needs {needed / 1e6:.0f} MB, but {max(free, 0) / 1e6:.0f} MB are free",
            hint="free some memory, or pass a smaller --seq-len",
            details={"needed_bytes": needed, "available_bytes": max(free, 0)},
        )
    return max(min(AT_ONCE // length, free // 2 // needed), 1)


def _hidden_states(model: Any, windows_NL: Tensor, at_once: int, progress: Progress) -> Tensor:
    """The last hidden states of a body, [N, L, H]."""
    states = []
    for ids_NL in torch.split(windows_NL, at_once):
        out = model.base_model(input_ids=ids_NL, attention_mask=torch.ones_like(ids_NL), return_dict=True)
        if getattr(out, "last_hidden_state", None) is None:
            raise UnsupportedError(f"the body of {type(model).__name__} returns no hidden states", hint=_HINT)
        model.lpconv_body = type(out)
        states.append(out.last_hidden_state)
        progress.advance(ids_NL.numel())
    return torch.cat(states)


def _token_slices(
    bodies: list[Tensor], windows_NL: Tensor, words: int
) -> Iterator[tuple[Tensor, list[Tensor], Tensor]]:
    """A few tokens at a time: ids [1, T], the hidden states of both models [1, T, H], and the next ids [T].

    The last token of a window has no next id; it gets -1.
    """
    following_NL = functional.pad(windows_NL[:, 1:], (0, 1), value=-1)
    step = max(_HEAD_BYTES // (4 * words), 1)
    for start in range(0, windows_NL.numel(), step):
        part = slice(start, start + step)
        hidden = [x.flatten(0, 1)[part].unsqueeze(0) for x in bodies]
        yield windows_NL.flatten()[part].unsqueeze(0), hidden, following_NL.flatten()[part]


def _text_logits(model: Any, ids_1T: Tensor, hidden_1TH: Tensor) -> Tensor:
    """Logits [T, V]: runs the model with a body that returns the given hidden states."""
    body = model.base_model
    body.forward = lambda *args, **kwargs: model.lpconv_body(last_hidden_state=hidden_1TH)
    try:
        out: Tensor = model(input_ids=ids_1T, return_dict=True).logits[0]
    finally:
        del body.forward
    return out


def _compare_tokens(wanted_TV: Tensor, got_TV: Tensor, following_T: Tensor | None = None) -> _TokenSums:
    """Compare logits in fp64, of a few tokens at a time; `following_T` has the next ids, -1 for unknown ones."""
    ids = torch.full((len(wanted_TV),), -1) if following_T is None else following_T
    slices = zip(*(torch.split(t, _EXACT) for t in (wanted_TV, got_TV, ids)), strict=True)
    return sum((_compare_slice(*part) for part in slices), _TokenSums())


def _compare_slice(wanted_TV: Tensor, got_TV: Tensor, following_T: Tensor) -> _TokenSums:
    x, y = wanted_TV.double(), got_TV.double()
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    finite, known = torch.isfinite(x), following_T >= 0
    difference, at = (x - y)[finite], following_T[known].unsqueeze(1)
    losses, source_losses = (-p[known].gather(1, at).squeeze(1) for p in (log_q, log_p))
    return _TokenSums(
        num=len(x),
        kl=float(_divergence(log_p, log_q).sum()),
        back=float(_divergence(log_q, log_p).sum()),
        same=int((x.argmax(-1) == y.argmax(-1)).sum()),
        error=float(difference.square().sum()),
        signal=float(x[finite].square().sum()),
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        equal=torch.equal(wanted_TV, got_TV),
        num_next=int(known.sum()),
        loss=float(losses.sum()),
        source_loss=float(source_losses.sum()),
        rises=tuple((losses - source_losses).tolist()),
    )
