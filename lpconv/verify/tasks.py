"""Compare two models by their answers to tasks of lm-eval, question by question.

The score of a model on n questions depends on the choice of these questions. Both models answer the same ones, so the
uncertainty of the difference comes only from the questions that they answer differently.
"""

import contextlib
import io
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, UnsupportedError, UsageError, check_installed
from lpconv.gates import VERIFY_GATES, is_of_task
from lpconv.lookup import find, nearest
from lpconv.progress import Progress, quiet_transformers
from lpconv.results import TaskCheck
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.student import estimate_mean, estimate_share
from lpconv.verify.options import VerifyOptions

_SEED = 1234  # of the examples in prompts; lm-eval's default
_BATCH_SIZE = 4  # few, because the logits of a batch for a whole vocabulary take gigabytes
_HINT = "leave --tasks out to compare weights only"


def check_tasks(options: VerifyOptions) -> None:
    """Check the tasks and their gates as far as possible without lm-eval, which takes seconds to import.

    Raises UsageError for a gate without tasks, InputError for a missing file, UnsupportedError if lm-eval is missing.
    """
    for gate in filter(is_of_task, options.gates):
        if not options.tasks:
            raise UsageError(f"gate `{gate}` needs the answers to a task", hint="pass the task to --tasks")
    for path in map(Path, filter(_is_path, options.tasks)):
        if not path.exists():
            near = nearest(path.name, [p.name for p in path.parent.glob("*")])
            hint = f"did you mean `{path.parent / near}`?" if near else "pass the path of a task file for lm-eval"
            raise InputError(f"task file `{path}` does not exist", hint=hint)
    if options.tasks:
        check_installed("--tasks", "lm-eval", extra="eval")


def _is_path(task: str) -> bool:
    """Whether a task is given by a path: of a YAML file, or of a folder with a slash."""
    return "/" in task or task.endswith((".yaml", ".yml"))


def load_tasks(options: VerifyOptions, progress: Progress) -> Mapping[str, Any]:
    """The tasks by name, with their questions. Groups and folders stand for their tasks.

    Raises UsageError for unknown tasks and for gates on scores that they lack, InputError for tasks that cannot be
    loaded.
    """
    from lm_eval.tasks import TaskManager

    progress.start("loading tasks", 0)
    names = options.tasks
    folders = [name for name in names if _is_path(name) and Path(name).is_dir()]
    tasks: dict[str, Any] = {}
    with _quiet():
        # To list the tasks that come with lm-eval takes seconds.
        manager = TaskManager(include_path=folders, include_defaults=not all(map(_is_path, names)))
        for name in names:
            if not _is_path(name):
                find("task", name, dict.fromkeys(manager.all_tasks))
            inside = TaskManager(include_path=name, include_defaults=False).all_subtasks if name in folders else [name]
            try:
                tasks |= manager.load(inside)["tasks"]
            except Exception as e:  # from YAML, jinja2, datasets or the network
                raise InputError(
                    f"task `{name}` cannot be loaded: {type(e).__name__}: {e}",
                    hint="`data_files` in task files are relative to the current directory; other data is on the hub",
                ) from e
    if not tasks:
        raise InputError(f"there are no tasks in {', '.join(names)}", hint="pass task files for lm-eval")
    _check_scores(tasks, options.gates)
    return tasks


def _check_scores(tasks: Mapping[str, Any], gates: Iterable[str]) -> None:
    """Raise UsageError for a gate on a score that no task has."""
    scores = [f"task:{name}:{metric}_drop" for name, task in tasks.items() for metric in task.aggregation()]
    for gate in filter(is_of_task, gates):
        metric = re.sub(r",[^:]*(?=_drop)", "", VERIFY_GATES.parse(gate).metric)  # without the name of a filter
        find("metric", metric.removesuffix("_high"), dict.fromkeys(scores))


def compare_on_tasks(
    model: Openable, reference: Openable, tasks: Mapping[str, Any], *, limit: int | None, progress: Progress
) -> tuple[TaskCheck, ...]:
    """Let the models of two checkpoints answer the tasks, in fp32, and compare their answers.

    Inputs of the layers of `model`, but not of `reference`, are rounded as the readers of the checkpoint round them.
    The tokenizer is the reference's, if it has one. Raises UnsupportedError for models that generate no text,
    ResourceError if memory cannot hold a model.
    """
    import torch

    from lpconv.models.load import load, open_as_served
    from lpconv.models.opening import model_errors
    from lpconv.models.tokenizer import tokenizer_of
    from lpconv.verify.outputs import check_model, rounding_words

    source, ours = Checkpoint.open(reference), Checkpoint.open(model)
    ask = partial(_answer_tasks, tokenizer=tokenizer_of((source, ours)), tasks=tasks, limit=limit, progress=progress)
    with model_errors("lm-eval fails on the tasks", hint=_HINT), quiet_transformers():
        for checkpoint in (source, ours):
            check_model(checkpoint)
        progress.start(f"opening {source.origin.name}", 0)
        answers = ask(load(source, dtype=torch.float32))
        progress.start(f"opening {ours.origin.name}", 0)
        with open_as_served(ours) as opened:
            checks = tuple(compare_answers(answers, ask(opened)))
            return tuple(replace(c, rounded_inputs=rounding_words(opened)) for c in checks)


def _answer_tasks(
    model: Any, tokenizer: Any, tasks: Mapping[str, Any], *, limit: int | None, progress: Progress
) -> Mapping[str, Any]:
    """lm-eval's results for a model, with a sample for each question; at most `limit` questions per task."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    if not model.can_generate():
        raise UnsupportedError(f"`{type(model).__name__}` generates no text, so it has no answers", hint=_HINT)
    with _quiet():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH_SIZE)
        for task in tasks.values():
            task.build_all_requests(limit=limit)
            task.set_fewshot_seed(_SEED)  # gives every model the same prompts
    requests = [r for task in tasks.values() for r in task.instances]
    is_generated = any(r.request_type == "generate_until" for r in requests)  # then a request takes several steps
    progress.start("answering questions", 0 if is_generated else len(requests), unit="answers")
    model.register_forward_hook(lambda _, inputs, outputs: progress.advance(len(outputs.logits)))
    with _quiet():
        results: Mapping[str, Any] = lm_eval.evaluate(
            lm=wrapped, task_dict={"tasks": tasks}, limit=limit, bootstrap_iters=0
        )
    return results


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Context manager that drops the messages and progress bars of lm-eval and datasets."""
    return contextlib.redirect_stderr(io.StringIO())


def compare_answers(source: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[TaskCheck]:
    """Compare the results of lm-eval for two models, with samples: one record for each score of each task."""
    for task, samples in source["samples"].items():
        others = {(s["doc_id"], s["filter"]): s for s in result["samples"][task]}
        pairs = [(s, others[s["doc_id"], s["filter"]]) for s in samples]
        assert all(a["prompt_hash"] == b["prompt_hash"] for a, b in pairs), f"{task}: the models got different prompts"
        for metric, name in dict.fromkeys((m, s["filter"]) for s in samples for m in s["metrics"]):
            scores = [r["results"][task].get(f"{metric},{name}") for r in (source, result)]
            if all(isinstance(score, numbers.Real) for score in scores):
                yield _compare_scores(
                    task,
                    metric if name == "none" else f"{metric},{name}",
                    scores,
                    [(a[metric], b[metric]) for a, b in pairs if a["filter"] == name],
                    is_loss=source["higher_is_better"][task].get(metric) is False,
                )


def _compare_scores(
    task: str, metric: str, scores: Sequence[float], values: Sequence[tuple[Any, Any]], *, is_loss: bool
) -> TaskCheck:
    """Compare the scores of source and result, with the value of each question for both."""
    check = TaskCheck(
        task=task, metric=metric, num_questions=len(values), source_score=float(scores[0]), score=float(scores[1])
    )
    if not all(_is_mean(score, column) for score, column in zip(scores, zip(*values, strict=True), strict=True)):
        return check
    losses = [float(b - a if is_loss else a - b) for a, b in values]
    if not {x for pair in values for x in pair} <= {0, 1}:
        return replace(check, drop=estimate_mean(losses))
    lost, won = losses.count(1), losses.count(-1)
    return replace(check, drop=estimate_share(lost, won, len(losses)), num_lost=lost, num_won=won)


def _is_mean(score: float, values: Sequence[Any]) -> bool:
    """Whether a score is the mean of one number per question; perplexities and F1 of a whole task are not."""
    return all(isinstance(v, numbers.Real) for v in values) and math.isclose(
        score, math.fsum(values) / len(values), rel_tol=1e-6, abs_tol=1e-9
    )
