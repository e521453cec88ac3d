"""Tasks of lm-eval (EleutherAI's evaluation harness), and the answers of a model to their questions."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.errors import InputError
from lpconv.lookup import find
from lpconv.progress import Progress
from lpconv.verify.tasks import is_path

_SEED = 1234  # of the examples in prompts; lm-eval's default
_BATCH_SIZE = 4  # few, because the logits of a batch for a whole vocabulary take gigabytes


def read_tasks(names: Sequence[str]) -> dict[str, Any]:
    """The tasks by name, with their questions. Groups and folders stand for their tasks.

    Raises UsageError for an unknown name, and InputError for a task that cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    folders = [name for name in names if is_path(name) and Path(name).is_dir()]
    tasks: dict[str, Any] = {}
    with _quiet():
        # To list the tasks that come with lm-eval takes seconds.
        manager = TaskManager(include_path=folders, include_defaults=not all(map(is_path, names)))
        for name in names:
            if not is_path(name):
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
    return tasks


def answer_tasks(
    model: Any, tokenizer: Any, tasks: Mapping[str, Any], *, limit: int | None, progress: Progress
) -> Mapping[str, Any]:
    """lm-eval's results for a model, with a sample for each question; at most `limit` questions per task."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH_SIZE)
        for task in tasks.values():
            task.build_all_requests(limit=limit)
            task.set_fewshot_seed(_SEED)  # gives every model the same prompts
    requests = [r for task in tasks.values() for r in task.instances]
    is_generated = any(r.request_type == "generate_until" for r in requests)  # then a request takes several steps
    progress.start("answering questions", 0 if is_generated else len(requests), unit="steps")
    model.register_forward_hook(lambda _, inputs, outputs: progress.advance(len(outputs.logits)))
    with _quiet():
        results: Mapping[str, Any] = lm_eval.evaluate(
            lm=wrapped, task_dict={"tasks": tasks}, limit=limit, bootstrap_iters=0
        )
    return results


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Context manager that drops the messages and progress bars of lm-eval and datasets."""
    return contextlib.redirect_stderr(io.StringIO())
