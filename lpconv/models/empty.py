"""The model of a checkpoint without its weights: what the config alone says about modules and sizes."""

from typing import Any

import torch
import transformers
from torch import nn

from lpconv.checkpoint.compressed import LinearModules
from lpconv.checkpoint.contents import Contents
from lpconv.errors import InputError, UnsupportedError
from lpconv.models.load import architecture
from lpconv.models.quiet import quiet_transformers

__all__ = ["count_parameters", "empty_model", "linear_modules"]


def empty_model(contents: Contents) -> nn.Module:
    """The class that the config names, on the meta device. Raises UnsupportedError where it cannot be built."""
    try:
        with quiet_transformers(), torch.device("meta"):
            config: Any = transformers.AutoConfig.from_pretrained(contents.directory, trust_remote_code=False)
            cls = architecture(contents.config)
            model: nn.Module = cls.from_config(config) if cls is transformers.AutoModel else cls._from_config(config)
    except UnsupportedError:
        raise
    except Exception as e:  # transformers raises anything at all for configs it does not know
        text = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise UnsupportedError(
            f"config.json builds no model: {text}", hint="lpconv builds the models of this release of transformers"
        ) from e
    return model


def linear_modules(contents: Contents) -> LinearModules:
    """The `Linear` modules of a model. Raises UnsupportedError where it cannot be built."""
    modules = empty_model(contents).named_modules()
    found = [(name, type(module)) for name, module in modules if isinstance(module, nn.Linear)]
    return LinearModules(
        plain=tuple(n for n, kind in found if kind is nn.Linear),
        derived=tuple(n for n, kind in found if kind is not nn.Linear),
    )


def count_parameters(contents: Contents, stored_elements: int) -> int:
    """The parameters of the model that the config describes, for a checkpoint that stores `stored_elements` numbers.

    Raises InputError where it stores less than half of them: building that model would fill memory with random numbers;
    UnsupportedError where it cannot be built.
    """
    count = sum(p.numel() for p in empty_model(contents).parameters())
    if stored_elements < count // 2:
        raise InputError(
            f"the weight files hold {stored_elements} numbers, the model of config.json has {count}",
            hint="the config belongs to another model, or weight files are missing",
        )
    return count
