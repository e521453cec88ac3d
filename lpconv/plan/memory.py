"""Memory that a conversion needs, estimated before it starts: blocks in work, then two models, one after the other.

The constants were measured on Linux with torch 2.13 and transformers 5.23 and are upper bounds: the peak of a run is 1
to 15 % below the estimate. Once loaded, torch is part of the process's memory; dry runs end before that.
"""

import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from lpconv.errors import ResourceError
from lpconv.forms.facts import BLOCK_ELEMENTS, CHECKED_ELEMENTS
from lpconv.gates import Gate, needs_logits
from lpconv.machine import available_memory, usable_cores
from lpconv.models.whole import known_shapes
from lpconv.plan.options import GPTAQ, NEAREST, ConvertOptions
from lpconv.plan.plan import Plan, PlannedTensor
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.place import any_indirect
from lpconv.storage.remote import WINDOW_BYTES, upload_bytes

# Up to this many weight bytes `--verify auto` also runs both models.
_AUTO_LOGITS_BYTES = 2 * 10**9
SPARE = 2  # blocks waiting for the writer while all workers are busy
_MAX_WORKERS = 8
_MIB = 2**20
_CLIENT_BYTES = 24 * _MIB  # obstore's code and connections
_OVERHEAD_BYTES = 8 * _MIB  # growth of Python itself
_TENSOR_BYTES = 8 * 2**10  # per tensor: header entry, record, row of a report
_WORK_BYTES = 12  # per element of a worker's fp32 scratch: value, code, error
# Tables of e4m3fn scales, codes and references: two spans of 64 entries each, and one of each in two threads.
_TABLES_BYTES = (2 + 2 + 4) * 64 * 2**18
_FITTING_BYTES = 192  # per element of a worker's temporary tensors when points are fitted to a budget
# Per element of the largest block during decoding, and of blocks that are compared in fp64 with their reference.
_DECODING_BYTES, _CHECKING_BYTES = 32, 96
# A torch that is built for CUDA takes more, without a GPU too: 470 MiB (2.11) to 640 MiB (2.15) to import.
_TORCH_PLACES = getattr(find_spec("torch"), "submodule_search_locations", ())
_HAS_CUDA = any(Path(place, "lib", "libtorch_cuda.so").exists() for place in _TORCH_PLACES)
_TORCH_BYTES = (680 if _HAS_CUDA else 200) * _MIB
_TRANSFORMERS_BYTES = (240 if _HAS_CUDA else 192) * _MIB  # with one architecture, and blocks kept by the heap
_ARCHITECTURE_BYTES = 64 * _MIB  # of these, for the architecture and the heap
_BUILDING_BYTES = (200 if _HAS_CUDA else 120) * _MIB  # and a model without weights, for comparing names and shapes
_TOKENIZER_BYTES = 5  # that a tokenizer leaves to the heap, per byte of its file
_COPIES_OF_SIDES = 2  # the computed scales, and those read back for comparison
_ROWS_BYTES = 80 * _MIB  # rows of weights in use, their activations, and memory for products
_ARRANGED_COPIES = 4  # two tensors held in another order of elements, and one being arranged
_COPIES_IN_MEMORY = 2  # the model, and the tensors being loaded into it
_CALIBRATING_BYTES = 256 * _MIB  # activations of the windows in one calibration pass, at least one window
AT_ONCE = 1024  # most tokens per forward pass of a body
ROUNDED_BYTES = 2**26  # of rounded weights in a file of a resumable conversion, at least; two copies are made in memory
SLAB = 2**23  # most numbers of a weight that are rounded together; rows are independent
_KEPT_BYTES = 160 * _MIB  # most that the heap keeps of freed activations, for each model
_LAYER = re.compile(r".*?\.\d+\.")
_HELD_BYTES = 768 * _MIB  # activations of windows that wait within a layer, at least those of one pass
# 2 x 32 tokens: logits of both models in fp32, their difference and four tables of probabilities in fp64.
_LOGITS_BYTES_PER_WORD = 2 * 32 * (2 * 4 + 6 * 8)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a whole run: `needed_bytes` with this many `workers`.

    `no_logits` is the reason why both models are not run. `in_files`: the models are run with their matrices left in
    the files, because logits were requested and the models do not fit in memory.
    """

    workers: int
    needed_bytes: int
    no_logits: str | None = None
    in_files: bool = False


def plan_memory(
    plan: Plan, checkpoint: Checkpoint, gates: tuple[Gate, ...], *, output: Path, uploads: bool = False
) -> Memory:
    """The largest number of workers that options and memory allow, and the memory that the run needs with them.

    With `uploads` the output goes to a store. An existing output at `output` may contain pointers to files in a store.
    Raises ResourceError if one worker is too much, or if logits are requested and both models do not fit even with
    matrices left in their files.
    """
    options = plan.options
    taken = psutil.Process().memory_info().rss
    now = taken + (0 if "torch" in sys.modules else _TORCH_BYTES) + _network(plan, checkpoint, output, uploads=uploads)
    available = taken + available_memory()
    budget = min(options.max_memory or available, available)
    is_light = "model_type" not in checkpoint.config or known_shapes(checkpoint.config) is not None
    loaded = now + (0 if is_light or "transformers" in sys.modules else _BUILDING_BYTES)
    workers = options.workers or min(len(usable_cores()), _MAX_WORKERS)
    while workers > 1 and loaded + _conversion_bytes(plan, workers) > budget:
        workers -= 1
    phases = {"the conversion": loaded + _conversion_bytes(plan, workers)}
    importing = _ARCHITECTURE_BYTES if "transformers" in sys.modules else _TRANSFORMERS_BYTES
    tokenizer = checkpoint.directory / "tokenizer.json"
    reading = _TOKENIZER_BYTES * tokenizer.stat().st_size if tokenizer.is_file() else 0
    streaming = now + _OVERHEAD_BYTES + importing + reading + _streamed_bytes(plan)
    if options.rounding != NEAREST:
        phases["rounding with error feedback"] = streaming + _rounding(plan)
    if options.has_input_scales or options.measures_cache:
        phases["running the model to measure its inputs"] = streaming + _CALIBRATING_BYTES
    for what, size in phases.items():
        if size > budget:
            raise _memory_error(what, size, budget, options)
    needed = max(phases.values())
    running = now + _models_bytes(plan, checkpoint)
    if options.verify == "logits" or needs_logits(gates):
        if running <= budget:
            return Memory(workers=workers, needed_bytes=max(needed, running))
        running = now + _streamed_models_bytes(plan, checkpoint)
        if running > budget:
            raise _memory_error("running both models to compare outputs", running, budget, options)
        return Memory(workers=workers, needed_bytes=max(needed, running), in_files=True)
    why = _why_no_logits(plan, checkpoint)
    if why is None and running > budget:
        why = _memory_error("running both models", running, budget, options).message
    return Memory(workers=workers, needed_bytes=needed if why else max(needed, running), no_logits=why)


def _why_no_logits(plan: Plan, checkpoint: Checkpoint) -> str | None:
    """Why `--verify auto` does not run the models, apart from memory; None if it does."""
    options = plan.options
    if options.verify != "auto":
        return f"--verify {options.verify} does not run the models"
    if plan.bytes_in > _AUTO_LOGITS_BYTES:
        return f"{plan.bytes_in / 1e9:.1f} GB of weights are too many to run by default; pass --verify logits"
    if "auto_map" in checkpoint.config and not options.trust_remote_code:
        return "the checkpoint needs its own code, which only runs with --trust-remote-code"
    if "model_type" not in checkpoint.config:
        return "config.json names no model_type"
    return None


def _network(plan: Plan, checkpoint: Checkpoint, output: Path, *, uploads: bool) -> int:
    """Memory for reading from and writing to a store. Uploaded files are read back for verification."""
    written = [p.name for p in output.glob("*.safetensors")] if os.path.isdir(output) else []
    downloads = any_indirect(checkpoint.directory, checkpoint.weight_files) or any_indirect(output, written)
    if not downloads and not uploads:
        return 0
    sent = max((sum(upload_bytes(f.size_bytes) for f in s.files) for s in plan.shards), default=0) if uploads else 0
    return _CLIENT_BYTES + (WINDOW_BYTES + sent if downloads else max(WINDOW_BYTES, sent))


def _conversion_bytes(plan: Plan, workers: int) -> int:
    largest = min(max((t.info.num_elements for t in plan.tensors), default=0), BLOCK_ELEMENTS)
    fitting = _FITTING_BYTES * largest if plan.options.budget_bits is not None else 0
    stored = max((-(-(t.info.num_bytes + t.bytes_out) // max(t.info.num_elements, 1)) for t in plan.tensors), default=0)
    buffers = ((workers + SPARE) * stored + workers * _WORK_BYTES) * largest  # only touched pages count
    checked = max((min(t.info.num_elements, max(CHECKED_ELEMENTS, t.form.cols)) for t in plan.tensors), default=0)
    temporary = workers * max(fitting, _DECODING_BYTES * largest + _CHECKING_BYTES * checked)
    sides = sum(c.num_bytes for t in plan.tensors for c in t.form.side) * _COPIES_OF_SIDES
    held = _ARRANGED_COPIES * max((t.info.num_bytes for t in plan.tensors if t.name in plan.orders), default=0)
    tables = _TABLES_BYTES if any(t.form.shares_scale and t.form.late_side for t in plan.tensors) else 0
    return _OVERHEAD_BYTES + len(plan.tensors) * _TENSOR_BYTES + buffers + temporary + sides + tables + held


def _rounding(plan: Plan) -> int:
    """Memory of error feedback: activations and states of the text, moments, rows of a weight, and codes of a layer."""
    weights = [t for t in plan.tensors if t.can_be_rounded]
    cols = [t.info.shape[-1] for t in weights] or [0]
    hidden, inner = statistics.mode(cols), max(cols)
    walks = 2 if plan.options.rounding == GPTAQ else 1
    of_text = 4 * (plan.options.calibration_tokens or 0) * walks
    states = 2 * of_text * hidden
    waiting = states + min(of_text * max(6 * hidden, 2 * hidden + inner), _HELD_BYTES)
    kept = min(waiting // 2, walks * _KEPT_BYTES)
    others, experts = ([t for t in weights if (".experts." in t.name) == is_expert] for is_expert in (False, True))
    codes, largest = _codes_of_layer(weights), max((t.bytes_out for t in weights), default=0)
    # Experts are the last weights of a layer. Once it is rounded, its codes are written.
    work = max(_codes_of_layer(others) + _working(others, walks), codes + _working(experts, walks))
    return waiting + kept + max(work, codes + 2 * min(codes, ROUNDED_BYTES + largest))


def _working(weights: Sequence[PlannedTensor], walks: int) -> int:
    """Memory of the moments or the factor, and of rows of a weight, for any of the weights."""
    factors = max((t.info.shape[-1] ** 2 for t in weights), default=0)
    rows = max((min(math.prod(t.info.shape[-2:]), SLAB) for t in weights), default=0)
    return 4 * walks * factors + 24 * rows


def _codes_of_layer(weights: Sequence[PlannedTensor]) -> int:
    """Bytes of the weights of the largest layer once they are rounded; experts in one tensor are coded at the end."""
    sizes = Counter[str]()
    for t in weights:
        bytes_out = t.form.plain.num_bytes if len(t.info.shape) > 2 else t.bytes_out
        sizes[match[0] if (match := _LAYER.match(t.name)) else ""] += bytes_out
    return max(sizes.values(), default=0)


def _models_bytes(plan: Plan, checkpoint: Checkpoint) -> int:
    """Both models, one at a time; then their outputs."""
    parameters = sum(t.info.num_elements for t in plan.tensors)
    models = 4 * parameters * _COPIES_IN_MEMORY
    return _OVERHEAD_BYTES + _TRANSFORMERS_BYTES + max(models, _logits_bytes(checkpoint))


def _streamed_models_bytes(plan: Plan, checkpoint: Checkpoint) -> int:
    """Activations, rows of matrices, and vectors of both models, one at a time; then their outputs.

    Models with their own code may use a weight in any way, so they are counted in full.
    """
    if "auto_map" in checkpoint.config:
        return _models_bytes(plan, checkpoint)
    return _OVERHEAD_BYTES + _TRANSFORMERS_BYTES + _streamed_bytes(plan) + _logits_bytes(checkpoint)


def _streamed_bytes(plan: Plan) -> int:
    """Memory of a model whose matrices stay in its files: vectors, and a few rows."""
    return _ROWS_BYTES + sum(4 * t.info.num_elements for t in plan.tensors if len(t.info.shape) < 2)


def _logits_bytes(checkpoint: Checkpoint) -> int:
    has_head = any("LM" in name or "For" in name for name in checkpoint.config.get("architectures") or ())
    inner = checkpoint.config.get("text_config")
    words = (inner if isinstance(inner, dict) else checkpoint.config).get("vocab_size")
    return words * _LOGITS_BYTES_PER_WORD if has_head and isinstance(words, int) else 0


def _memory_error(what: str, needed: int, budget: int, options: ConvertOptions) -> ResourceError:
    is_asked = options.max_memory is not None and budget == options.max_memory
    return ResourceError(
        f"{what} needs {needed / 1e6:.0f} MB of memory, but {budget / 1e6:.0f} MB are allowed",
        hint=("raise --max-memory" if is_asked else "free some memory")
        + (", or use --verify weights" if "models" in what else "")
        + (", or use fewer --calibration-tokens" if "feedback" in what else ""),
        details={"needed_bytes": needed, "budget_bytes": budget},
    )


def window_bytes(config: Any, length: int) -> int:
    """Bytes of a body's activations for a window of `length` tokens."""
    hidden, inner = _sizes(config)
    # In fp32: the residual, its norm, queries, keys, values, a sum or two; three tensors of the inner size.
    return 4 * length * (8 * hidden + 3 * inner)


def windows_together(config: Any, length: int, *, num_outputs: int = 0) -> int:
    """Number of windows per calibration pass, from the model alone, so that results do not depend on free memory.

    `num_outputs` is the number of outputs per token if the head runs as well.
    """
    size = window_bytes(config, length) + 4 * length * num_outputs
    return max(min(AT_ONCE // length, _CALIBRATING_BYTES // size), 1)


def held_together(config: Any, length: int, at_once: int) -> int:
    """Number of passes of `at_once` windows whose activations are held within a layer."""
    hidden, inner = _sizes(config)
    # In fp32: six tensors of the hidden size before the output of attention; two and the inner one later.
    return max(_HELD_BYTES // (4 * length * at_once * max(6 * hidden, 2 * hidden + inner)), 1)


def _sizes(config: Any) -> tuple[int, int]:
    """The hidden size and the largest inner one, from the config that transformers reads."""
    text = config.get_text_config()
    hidden: int = text.hidden_size
    inner: int | list[int] = getattr(text, "intermediate_size", None) or 4 * hidden
    return hidden, max(inner) if isinstance(inner, list) else inner
