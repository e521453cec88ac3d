"""Which tensors of a checkpoint are the weights of `Linear` modules, by building the model without its weights."""

from typing import Any

import torch
import transformers
from torch import nn

from lpconv.checkpoint.compressed import LinearModules
from lpconv.checkpoint.contents import Contents
from lpconv.errors import UnsupportedError
from lpconv.hf.load import architecture
from lpconv.hf.quiet import quiet_transformers

__all__ = ["linear_modules"]


def linear_modules(contents: Contents) -> LinearModules:
    """The `Linear` modules of the class that the config names. Raises UnsupportedError where it cannot be built."""
    with quiet_transformers():
        model = _empty_model(contents)
    found = [(name, type(module)) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return LinearModules(
        plain=tuple(n for n, kind in found if kind is nn.Linear),
        derived=tuple(n for n, kind in found if kind is not nn.Linear),
    )


def _empty_model(contents: Contents) -> nn.Module:
    try:
        config: Any = transformers.AutoConfig.from_pretrained(contents.directory, trust_remote_code=False)
        cls = architecture(contents.config)
        make = cls.from_config if cls is transformers.AutoModel else cls._from_config
        with torch.device("meta"):
            model: nn.Module = make(config)
    except Exception as e:  # transformers raises anything at all for configs it does not know
        text = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise UnsupportedError(
            f"the model cannot be built, so its Linear modules are not known: {text}", hint="use --layout lpconv"
        ) from e
    return model
