"""Advice on low precision for a model: measure candidates, recommend one, and write the jobs that carry it out."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.advise.options import AdviseOptions as AdviseOptions, Budget as Budget
    from lpconv.advise.record import read_advice as read_advice
    from lpconv.advise.run import advise as advise

__all__ = lazily(__name__)
