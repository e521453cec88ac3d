"""`lpconv finetune` as a library call: cheap checks first, before torch and transformers are imported."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lpconv.data.texts import check_seq_len, check_tokenizer, num_positions
from lpconv.errors import UnsupportedError, UsageError
from lpconv.layouts.reader import open_readable
from lpconv.machine import is_first_process
from lpconv.models.presets import PRESETS
from lpconv.options import with_keywords
from lpconv.progress import Progress, Silent
from lpconv.results import FinetuneResult, MemoryPlan
from lpconv.storage.checkpoint import Checkpoint, Openable, name_of
from lpconv.storage.contents import check_config, read_json
from lpconv.storage.staging import check_apart, read_marker
from lpconv.train.data import check_data
from lpconv.train.folder import asked_for, check_folder
from lpconv.train.options import OWN_PACKAGE, FinetuneOptions, check_options, check_start, not_planned, task_in
from lpconv.train.outcome import parse_gates
from lpconv.train.recoverable import base_of_twin, check_recoverable


@with_keywords(FinetuneOptions)
def finetune(
    model: Openable,
    output: Path | str,
    options: FinetuneOptions,
    *,
    progress: Progress | None = None,
    command: str | None = None,
) -> FinetuneResult:
    """Fine-tune `model` and its twin, and fill the folder `output`.

    The result contains the gates; failed gates raise nothing here (see `lpconv.train.outcome.gate_problem`). Raises an
    `LpconvError` for every failure that is not a bug; DivergedError if training does not stay finite.
    """
    output, progress = Path(output), progress or Silent()
    check_options(options)
    missing = next((n for n in options.log_to if n in OWN_PACKAGE and find_spec(n) is None), None)
    if missing is not None:
        raise UnsupportedError(f"--log-to {missing}: its package is not installed", hint=f"pip install {missing}")
    gates = parse_gates(options)
    check_data(options)
    if is_first_process():  # only the first process writes, and it may have created the folder already
        check_folder(output, asked_for(name_of(model), options), resume=options.resume, force=options.force)
        if options.resume and not os.path.lexists(output):
            progress.message(f"there is no `{output}` to resume, so the run starts from the beginning")
    checkpoint = open_readable(model, revision=options.revision)
    check_start(options, checkpoint.config)
    check_tokenizer(checkpoint.directory)
    start = check_recoverable(checkpoint, options.source) if options.arithmetic.on_codes else None
    has_adapters = options.arithmetic.lora and options.twin_arithmetic is not None
    twin = base_of_twin(checkpoint, options.source) if has_adapters else None
    for used in filter(None, (checkpoint, start.source if start else None, twin)):
        used.check_apart(output)
    if start is not None and start.adapter is not None:
        base, record = str(start.adapter.config.get("base_model_name_or_path")), read_marker(checkpoint.directory)
        if Path(base).name not in {Path(str(n)).name for n in (name_of(model), record["source"].get("name"), None)}:
            progress.message(f"the adapter's base model `{base}` is neither `{checkpoint.origin.name}` nor its source")
        check_apart(start.adapter.folder, output)
    check_seq_len(options.seq_len, num_positions(checkpoint.config))
    check_data(options, checkpoint)
    from lpconv.train.study import study  # imports torch and transformers (seconds)

    return study(checkpoint, output, options, gates, progress=progress, command=command, start=start, twin=twin)


def plan(model: str, options: FinetuneOptions) -> MemoryPlan:
    """Memory of a step of `model` on each rank, for every possible recipe; raises as `memory_plan` does."""
    check_options(options)
    if flag := options.arithmetic.flag:
        raise UsageError(f"--dry-run does not support {flag}, which runs in one process", hint="leave --dry-run out")
    settings = _read_config(model, options.revision)
    check_start(options, settings)
    if (task := task_in(settings, options.task)) in ("classification", "seq2seq"):
        raise not_planned(task)
    from lpconv.train.memory_plan import memory_plan  # imports torch and transformers (seconds)

    return memory_plan(model, settings, options)


def _read_config(model: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a preset, a directory or file, or anything else that is a name of a checkpoint."""
    path = Path(os.path.expanduser(model))
    if model in PRESETS and not path.is_dir():
        settings: dict[str, Any] = PRESETS[model].config().to_dict()  # imports transformers (seconds)
        return settings
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        settings = read_json(path)
        check_config(settings, path)
        return settings
    return Checkpoint.open(model, revision=revision).config
