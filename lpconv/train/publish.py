"""The trained model as a checkpoint in the run's folder: plain, or in the form of `lpconv convert`."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.staging import MARKER
from lpconv.convert.files import copy_side_files, model_side_files, write_sums
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.models.quiet import quiet_transformers
from lpconv.shards import whole
from lpconv.train.job import TrainingJob
from lpconv.train.one import Finished
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import is_main_process
from lpconv.train.recipes import saved_as

__all__ = ["form_of", "publish_model", "write_checksums"]

# Of the source's side files, those that are about its own training.
_NOT_COPIED = {"metrics.json"}


def form_of(options: FinetuneOptions) -> tuple[str, str]:
    """The method and format that the model is published in; "plain" keeps everything that training kept."""
    method, format = saved_as(options.arithmetic)
    return (method, format) if options.save == "converted" or method == "plain" else ("plain", "fp32")


def publish_model(output: Path, job: TrainingJob, finished: Finished) -> None:
    """Write the model and the source's tokenizer into `output`; a converted form is checked against the trained one.

    All processes call it, because they may have to gather what is written, tensor by tensor; the main one keeps and
    writes it.
    """
    values = finished.prepared.values(finished.optimizer)
    whole_values = {}
    for x in {id(x): x for x in values.values()}.values():
        found = whole(x)  # by all ranks together
        if is_main_process():
            whole_values[id(x)] = found.cpu()
    if is_main_process():
        _publish(output, job, finished.prepared.model, {name: whole_values[id(x)] for name, x in values.items()})


def _publish(output: Path, job: TrainingJob, model: Any, values: dict[str, Tensor]) -> None:
    method, format = form_of(job.options)
    trained = output / "runs" / "trained"
    shutil.rmtree(trained, ignore_errors=True)
    is_bf16 = (method, format) == ("plain", "bf16")
    if job.examples.labels:
        model.config.id2label = dict(enumerate(job.examples.labels))
        model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    with quiet_transformers():
        model.save_pretrained(trained, state_dict=_rounded(values) if is_bf16 else values)
        # Which has named the dtype that the model was trained in, and not that of `values`.
        model.config.dtype = torch.bfloat16 if is_bf16 else torch.float32
        model.config.save_pretrained(trained)
    contents = read_contents(job.directory)
    copy_side_files(trained, contents, (n for n in model_side_files(contents) if n not in _NOT_COPIED), renamed={})
    if method == "plain":
        _move(trained, output)
        return
    converted = output / "runs" / "converted"
    convert(str(trained), converted, ConvertOptions(method=method, format=format, verify="weights", force=True))
    for name in ("README.md", "report.json", "report.html", "SHA256SUMS"):
        (converted / name).unlink(missing_ok=True)
    _move(converted, output)
    shutil.rmtree(trained)


def _rounded(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In bf16; tied tensors stay one."""
    made: dict[int, Tensor] = {}
    for x in values.values():
        made.setdefault(x.data_ptr(), x.to(torch.bfloat16) if x.is_floating_point() else x)
    return {name: made[x.data_ptr()] for name, x in values.items()}


def write_checksums(output: Path) -> None:
    """Of all files of a converted output, as `lpconv verify` wants them, the run's own included."""
    if (output / MARKER).exists():
        write_sums(output, ())


def _move(source: Path, target: Path) -> None:
    """Move the files of one folder into another, which may hold some already."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
    shutil.rmtree(source)
