"""A model opened for a purpose, what it is made of, and inputs for it."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.models.empty import empty_model as empty_model
    from lpconv.models.inputs import example_inputs as example_inputs
    from lpconv.models.load import load as load
    from lpconv.models.opening import Opened as Opened, open_to_trace as open_to_trace
    from lpconv.models.presets import PRESETS as PRESETS
    from lpconv.models.tasks import TASKS as TASKS, find_task as find_task
    from lpconv.models.tokenizer import read_tokenizer as read_tokenizer

__all__ = lazily(__name__)
