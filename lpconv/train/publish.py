"""Save the trained model in the run's folder: plain, or in the form of `lpconv convert`."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.models.tasks import CLM, MLM
from lpconv.models.tokenizer import read_tokenizer
from lpconv.plan.files import copy_side_files, model_side_files, write_sums
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Progress, quiet_transformers
from lpconv.results import Series
from lpconv.shards import gather_whole
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import ADAPTER
from lpconv.storage.partfile import writing
from lpconv.train.folder import PAGE, PUBLISHED, REPORT, RUNS
from lpconv.train.held_out import as_published
from lpconv.train.job import TrainingJob, TrainingRun
from lpconv.train.lora import save_adapter
from lpconv.train.one import Finished, figures_in_fp32
from lpconv.train.processes import is_main_process, wait_for_all
from lpconv.train.recover import GridAdamW

_LAST = ("config.json", ADAPTER)  # a model or adapter opens only with this file, which moves last
# Side files of the source that describe its own training.
_NOT_COPIED = {"metrics.json"}


def publish_model(
    output: Path, job: TrainingJob, work: TrainingRun, finished: Finished, progress: Progress
) -> tuple[Series, ...]:
    """Publish the model of a run below `output`, with the source's tokenizer.

    Returns its held-out metrics in fp32, after opening it from its files. `in_place` moves the first seed's model. A
    converted form is checked against the trained model. All processes call this, because tensors may have to be
    gathered; the main process stores and writes them.
    """
    folder = (output / RUNS if work.seed == job.options.seed else work.folder) / PUBLISHED
    values = finished.prepared.values(finished.optimizer)
    whole_values = {}
    for x in {id(x): x for x in values.values()}.values():
        whole = gather_whole(x)  # collective: all ranks
        if is_main_process():
            whole_values[id(x)] = whole.cpu()
    if is_main_process():
        with writing(folder.parent):
            _publish(folder, job, finished, {name: whole_values[id(x)] for name, x in values.items()})
    del values, whole_values
    wait_for_all()
    if job.options.arithmetic.lora:  # adapters are published as they were trained
        return as_published(finished.record.evaluations)
    with quiet_transformers():
        published = replace(job, checkpoint=Checkpoint.open(folder))
        return figures_in_fp32(published, work, finished.prepared.model.device, None, progress)


def _publish(published: Path, job: TrainingJob, finished: Finished, values: dict[str, Tensor]) -> None:
    model = finished.prepared.model
    method, format = job.options.saved_form
    trained = published.with_name("trained")
    shutil.rmtree(trained, ignore_errors=True)
    shutil.rmtree(published, ignore_errors=True)
    if method == "recovered":
        assert job.recovery is not None
        assert isinstance(finished.optimizer, GridAdamW)
        job.recovery.publish(published, values, finished.optimizer)
        _remove_reports(published)
        return
    if method == "adapter":
        save_adapter(published, job.checkpoint, job.task.name, model, values)
        return
    is_bf16 = (method, format) == ("plain", "bf16")
    if job.examples.labels:
        model.config.id2label = dict(enumerate(job.examples.labels))
        model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    start = job.checkpoint
    model.config.use_cache = start.config.get("use_cache", True)  # training turns it off
    with quiet_transformers():
        model.save_pretrained(trained, state_dict=_round_to_bf16(values) if is_bf16 else values)
        # save_pretrained stored the dtype of training, not that of `values`.
        model.config.dtype = torch.bfloat16 if is_bf16 else torch.float32
        model.config.save_pretrained(trained)
    copy_side_files(trained, start, (n for n in model_side_files(start) if n not in _NOT_COPIED), renamed={})
    if job.task not in (CLM, MLM) and (tokenizer := read_tokenizer(trained)).pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(job.pad_id)  # as in the training
        tokenizer.save_pretrained(trained)
    if method == "plain":
        os.rename(trained, published)
        return
    convert(str(trained), published, ConvertOptions(method=method, format=format, verify="weights", force=True))
    _remove_reports(published)
    shutil.rmtree(trained)


def _remove_reports(published: Path) -> None:
    """Delete the reports of a conversion, which describe less than those of the fine-tuning."""
    for name in ("README.md", "report.json", "report.html", "SHA256SUMS"):
        (published / name).unlink(missing_ok=True)


def _round_to_bf16(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values in bf16; tied tensors stay tied."""
    rounded: dict[int, Tensor] = {}
    for x in values.values():
        rounded.setdefault(x.data_ptr(), x.to(torch.bfloat16) if x.is_floating_point() else x)
    return {name: rounded[x.data_ptr()] for name, x in values.items()}


@contextmanager
def in_place(output: Path) -> Iterator[None]:
    """Move the files of `publish_model` into `output`; the block writes the reports.

    SHA256SUMS is written before the block, for `lpconv verify` and --force, and the config moves after it: a failed
    run leaves no model that opens, and no reports. A second call continues after an interruption.
    """
    published = output / RUNS / PUBLISHED
    config = next((published / name for name in _LAST if (published / name).exists()), published / _LAST[0])
    with writing(output):
        for path in sorted(p for p in published.rglob("*") if p.is_file() and p != config):
            place = output / path.relative_to(published)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        write_sums(output, (), renamed={config.relative_to(output).as_posix(): config.name})
        try:
            yield
            if config.exists():
                os.replace(config, output / config.name)
        except BaseException:
            for name in (REPORT, PAGE) if config.exists() else ():
                (output / name).unlink(missing_ok=True)
            raise
        shutil.rmtree(published, ignore_errors=True)
