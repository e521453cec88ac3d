"""What a command can refuse before torch is imported, which takes seconds: names, files, and a place that is taken.

The engines check the same again, for those who call them without the command line.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lpconv.checkpoint.checkpoint import Checkpoint, Openable
from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.header import TensorInfo
from lpconv.checkpoint.place import any_pointer
from lpconv.checkpoint.resolve import base_name
from lpconv.data import read_text
from lpconv.errors import InputError, UnsupportedError
from lpconv.machine import may_have_gpu
from lpconv.options import check

if TYPE_CHECKING:
    from lpconv.advise.options import AdviseOptions
    from lpconv.bench.options import BenchOptions
    from lpconv.convert.options import VerifyOptions
    from lpconv.export.options import ExportOptions
    from lpconv.init.options import InitOptions
    from lpconv.probe.options import ProbeOptions
    from lpconv.results import BenchResult
    from lpconv.train.options import FinetuneOptions


_LOOKED_AT = 4_000_000  # characters of a text
_SPECIAL_TOKENS = 8  # that a tokenizer adds, at most
_SEQ_LEN = 128  # of a probe, where nobody says and the model has as many positions


def output_of(output: str | None, model: str, *words: str) -> Path:
    """The directory to write: `output`, by default the model's name and `words` with dashes, in the current one."""
    return Path(output or "-".join((base_name(model), *(word.replace(" ", "-") for word in words))))


def before_finetuning(model: str, output: Path, options: "FinetuneOptions") -> None:
    """Of `lpconv finetune`."""
    from lpconv.train.data import check_data
    from lpconv.train.folder import check_folder
    from lpconv.train.options import check_options, check_start
    from lpconv.train.outcome import parse_gates

    check_options(options)
    parse_gates(options)
    check_data(options)
    if os.environ.get("RANK", "0") == "0":  # of torchrun's processes, the first may have begun the folder already
        check_folder(output, model, options)
    check_start(options, _contents(model, options.revision).config)


def before_init(model: str, output: Path, options: "InitOptions") -> None:
    """Of `lpconv init`."""
    from lpconv.checkpoint.staging import check_apart, check_free
    from lpconv.init.options import config_place
    from lpconv.init.sizes import resized

    place = config_place(model, options)
    if isinstance(place, Path):
        config = read_json(place / "config.json" if place.is_dir() else place)
        resized(config, width=options.width, layers=options.layers)
    if isinstance(place, Path) and place.is_dir():
        check_apart(place, output)
    check_free(output, force=options.force)


def before_probe(model: str, output: Path, options: "ProbeOptions") -> None:
    """Of `lpconv probe`."""
    from lpconv.checkpoint.staging import check_free
    from lpconv.probe.options import PROBE_FILE

    check(options)
    check_free(output, force=options.force, marker=PROBE_FILE)
    config = _contents(model, options.revision).config
    most = next(
        (n for k in ("max_position_embeddings", "n_positions") if isinstance(n := config.get(k), int)), _SEQ_LEN
    )
    _check_text(options.data, options.seq_len or min(_SEQ_LEN, most))


def before_advice(model: str, output: Path, options: "AdviseOptions") -> None:
    """Of `lpconv advise`."""
    from lpconv.advise.options import ADVICE_FILE, check_advise
    from lpconv.checkpoint.staging import check_free
    from lpconv.train.data import check_data

    check_advise(options)
    check_data(options.training("fp32", steps=options.steps))
    check_free(output, force=options.force, marker=ADVICE_FILE)
    _contents(model, options.revision)


def before_export(model: str, output: Path, options: "ExportOptions") -> None:
    """Of `lpconv export onnx`."""
    from lpconv.checkpoint.staging import check_apart, check_free
    from lpconv.export.options import choose_opset, has_fp8, need

    check(options)
    contents = _contents(model, options.revision)
    choose_opset(options.opset, has_fp8=contents.kind == "safetensors" and has_fp8(contents))
    check_apart(contents.directory, output)
    check_free(output, force=options.force)
    need("onnxscript", *(["onnxruntime"] if options.validate else []))


def before_bench(options: "BenchOptions", save: Path | None) -> "Callable[[BenchResult], BenchResult]":
    """Of `lpconv bench`; gives back what its result is judged by. A name of the hub is left to the processes."""
    from lpconv.bench.outcome import judge_of
    from lpconv.checkpoint.partfile import check_file
    from lpconv.models.presets import PRESETS

    check(options)
    if (options.device or "").startswith("cuda") and not may_have_gpu():
        raise UnsupportedError(f"there is no GPU here for --device {options.device}", hint="--device cpu")
    judge = judge_of(options)
    if save is not None:
        check_file(save)
    if options.model is not None and options.model not in PRESETS:
        _contents(options.model, None)
    return judge


def before_verifying(path: Path, options: "VerifyOptions", page: Path | None = None) -> None:
    """Of `lpconv verify`; `page` is where its page goes.

    Any checkpoint is compared by values; other levels are of outputs of `lpconv convert`.
    """
    from lpconv.checkpoint.partfile import check_file
    from lpconv.checkpoint.staging import check_marked, is_output
    from lpconv.convert.options import check_verify

    check_verify(options)
    if page is not None:
        check_file(page)
    _check_text(options.data)
    if options.level == "values" or (options.level is None and options.against and not is_output(path)):
        _readable(path)
    else:
        check_marked(path)


def before_restoring(path: Path, output: Path, *, force: bool) -> bool:
    """Of `lpconv restore`; gives back whether `path` is quantised by others, or by us without a record of it."""
    from lpconv.checkpoint.compressed import quantized_by
    from lpconv.checkpoint.staging import check_apart, check_free, check_marked, is_output

    config = {} if is_output(path) or not path.exists() else _readable(path).config
    is_others = quantized_by(config) is not None
    if not is_others:
        check_marked(path)
    check_apart(path, output)
    check_free(output, force=force)
    return is_others


def _check_text(file: Path | None, seq_len: int = 1) -> None:
    """Refuse a file that is no text, or too short for one sequence whatever its tokens are: each is a byte at least."""
    size = seq_len if file is None else len(read_text(file, _LOOKED_AT).encode())
    if size + _SPECIAL_TOKENS < seq_len:
        short = f"`{file}` has {size} bytes, fewer than one sequence of {seq_len} tokens"
        raise InputError(short, hint="pass a longer text, or shorter sequences by --seq-len")


def _contents(model: str, revision: str | None) -> Checkpoint:
    """What a checkpoint has, its files as long as their headers say; those that lie elsewhere are not asked."""
    return _readable(model, revision)


def _readable(model: Openable, revision: str | None = None) -> Checkpoint:
    """What a checkpoint has; UnsupportedError for the layouts of others that are not read."""
    from lpconv.forms import Headers
    from lpconv.forms.foreign import check_readable

    contents, tensors = Checkpoint.open(model, revision=revision), dict[str, TensorInfo]()
    is_here = contents.kind == "safetensors" and not any_pointer(contents.directory, contents.weight_files)
    for header in contents.headers.values() if is_here else ():
        tensors |= header.tensors
    check_readable(Headers.of(contents.config, tensors))
    return contents
