"""The model of a checkpoint without its weights: what the config alone says about modules, sizes and memory."""

from collections.abc import Iterable

import torch
from torch import nn

from lpconv.checkpoint.compressed import LinearModules
from lpconv.checkpoint.contents import Contents
from lpconv.errors import InputError, ResourceError
from lpconv.layers import linears
from lpconv.machine import available_memory
from lpconv.models.opening import model_errors, read_config
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import architecture, concrete

__all__ = ["check_fits", "check_memory", "empty_model", "linear_modules", "num_parameters"]

_HINT = "lpconv builds the models of this release of transformers"


def empty_model(contents: Contents) -> nn.Module:
    """The class that the config names, on the meta device. Raises UnsupportedError where it cannot be built."""
    config = read_config(contents, hint=_HINT)
    with quiet_transformers(), torch.device("meta"), model_errors("config.json builds no model", hint=_HINT):
        model: nn.Module = concrete(architecture(contents.config), config)._from_config(config)
    return model


def num_parameters(contents: Contents) -> int:
    """Numbers in the model that config.json describes. Raises UnsupportedError where it cannot be built."""
    return sum(p.numel() for p in empty_model(contents).parameters())


def linear_modules(contents: Contents) -> LinearModules:
    """The modules of a model that readers may take for quantised. Raises UnsupportedError where it cannot be built.

    Those that transformers keeps in fp32, whatever a config says, count with those that cannot be.
    """
    model = empty_model(contents)
    wide = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    found = linears(model)
    plain = [x.name for x in found if x.kind == "Linear" and x.is_plain and not _is_in(x.name, wide)]
    others = dict.fromkeys(x.name for x in found if x.kind in ("Linear", "experts") and x.name not in plain)
    return LinearModules(plain=tuple(plain), others=tuple(others))


def _is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether a module's name has one of some parts of names."""
    return any(f".{part}." in f".{name}." for part in parts)


def check_fits(contents: Contents, stored_elements: int, *, copies: int, what: str) -> None:
    """Refuse a model before it is built: one that the weight files cannot be, or that memory does not hold.

    Memory is to hold so many copies in fp32; `stored_elements` are the numbers in the weight files. Raises InputError
    where they are less than half of the parameters: building that model would fill memory with random numbers;
    ResourceError, and UnsupportedError where transformers does not build it.
    """
    count = num_parameters(contents)
    if stored_elements < count // 2:
        raise InputError(
            f"the weight files hold {stored_elements} numbers, the model of config.json has {count}",
            hint="the config belongs to another model, or weight files are missing",
        )
    check_memory(count, copies=copies, what=what)


def check_memory(num_parameters: int, *, copies: int, what: str) -> None:
    """Raise ResourceError unless memory holds so many copies of a model in fp32."""
    needed = 4 * num_parameters * copies
    available = available_memory()
    if needed > available:
        raise ResourceError(
            f"{what} in fp32 needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free",
            hint="free some memory, or use a larger machine",
            details={"needed_bytes": needed, "available_bytes": available},
        )
