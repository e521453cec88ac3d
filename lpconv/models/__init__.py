"""Opening models to run, trace, train or time; their tasks, tokenizers and example inputs."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.models.empty import empty_model as empty_model
    from lpconv.models.inputs import example_inputs as example_inputs, random_ids as random_ids
    from lpconv.models.load import load as load
    from lpconv.models.opening import (
        Blueprint as Blueprint,
        Opened as Opened,
        blueprint as blueprint,
        open_to_run as open_to_run,
        open_to_trace as open_to_trace,
        open_to_train as open_to_train,
    )
    from lpconv.models.presets import PRESETS as PRESETS
    from lpconv.models.tasks import TASKS as TASKS, Task as Task, find_task as find_task, task_of as task_of
    from lpconv.models.tokenizer import read_tokenizer as read_tokenizer

__all__ = lazily(__name__)
