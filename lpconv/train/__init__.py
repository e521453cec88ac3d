"""Short fine-tuning in low precision next to a high-precision twin, with `transformers.Trainer`."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.train.options import FinetuneOptions as FinetuneOptions
    from lpconv.train.recipes import (
        RECIPES as RECIPES,
        Arithmetic as Arithmetic,
        ArithmeticOptions as ArithmeticOptions,
        arithmetic as arithmetic,
    )
    from lpconv.train.run import finetune as finetune

__all__ = lazily(__name__)
