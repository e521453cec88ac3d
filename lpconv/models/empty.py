"""The model of a checkpoint without weights: its modules, sizes and memory from the config alone."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lpconv.errors import ResourceError
from lpconv.layers import embeddings, linears
from lpconv.layouts.linears import LinearModules
from lpconv.machine import available_memory
from lpconv.models.load import load_from_state, missing_parameters
from lpconv.models.opening import error_line, model_errors, transformers_config
from lpconv.models.tasks import architecture, resolve_auto_class
from lpconv.progress import quiet_transformers
from lpconv.storage.checkpoint import Checkpoint

_STACKED, _ALONE = "MergeModulelist", "renamed"
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_OLD_BUFFER = re.compile(r"\.(\w*mask|masked_bias|attn_bias|inv_freq|position_ids|relative_position_index)$")
_HINT = "lpconv builds the models that the installed transformers knows"


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """Build the class that the config names, on the meta device. Raises UnsupportedError if that is not possible."""
    config = transformers_config(checkpoint, hint=_HINT)
    with quiet_transformers(), torch.device("meta"), model_errors("no model can be built from config.json", hint=_HINT):
        model: nn.Module = resolve_auto_class(architecture(checkpoint.config), config)._from_config(config)
    return model


def compare_empty(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The report of transformers on loading tensors of these names and shapes into `empty_model`: fields of a `Fit`."""
    model = empty_model(checkpoint)
    name, config = type(model).__name__, transformers_config(checkpoint, hint=_HINT)
    state = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    lists = {f"{n}." for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    lists |= {x.removeprefix(f"{model.base_model_prefix}.") for x in lists}
    try:
        with quiet_transformers():
            _, report = load_from_state(
                type(model), config, state, device_map={"": "meta"}, ignore_mismatched_sizes=True
            )
    except Exception as e:  # raised by operations on tensors that do not fit together
        return {"model": name, "missing": _missing_experts(shapes), "error": error_line(e)}
    unused = report["unexpected_keys"] - {n for n, _ in model.named_buffers()}
    extra = {n for n in unused if n.startswith(tuple(lists)) and not _is_old_buffer(n, shapes.get(n, (0, 0)))}
    wrong = {n: (tuple(stored), tuple(expected)) for n, stored, expected in report["mismatched_keys"]}
    experts = _missing_experts(shapes) if wrong else ()
    return {
        "model": name,
        "missing": tuple(sorted({*missing_parameters(architecture(checkpoint.config), report), *experts})),
        "extra": tuple(sorted(extra)),
        "unused": tuple(sorted(unused - extra)),
        "shapes": {} if experts else dict(sorted(wrong.items())),
        "is_bare": not checkpoint.config.get("architectures"),
    }


def _is_old_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor in a layer is a mask or constant that earlier releases of transformers stored."""
    return not shape or _OLD_BUFFER.search(name) is not None or (name.endswith(".bias") and len(shape) > 2)


def _missing_experts(names: Iterable[str]) -> tuple[str, ...]:
    """Weights that some experts lack and others have; transformers only reports that a stack of them is too small."""
    present = {m[0]: m.groups() for n in names if (m := _EXPERT.fullmatch(n))}
    blocks, numbers, leaves = ({parts[i] for parts in present.values()} for i in range(3))
    return tuple(sorted({f"{b}{i}{leaf}" for b in blocks for i in numbers for leaf in leaves} - present.keys()))


def num_parameters(checkpoint: Checkpoint) -> int:
    """Number of parameters of the model that config.json describes. Raises UnsupportedError if it cannot be built."""
    return sum(p.numel() for p in empty_model(checkpoint).parameters())


def linear_modules(checkpoint: Checkpoint, names: Iterable[str]) -> LinearModules:
    """The modules of a model that readers may treat as quantised. Raises UnsupportedError if it cannot be built.

    `names` are the names of the tensors in the files. Modules that transformers always keeps in fp32 count among those
    that cannot be quantised.
    """
    model = empty_model(checkpoint)
    wide = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    stored = _stored_names(model, names)
    plain: dict[str, str] = {}  # with the model's names
    others, fused = list[str](), set[str]()
    for x in linears(model):
        sources = stored.get(f"{x.name}.{x.parameter}", {})
        is_wide = any(f".{part}." in f".{x.name}." for part in wide)
        if x.kind == "Linear" and x.is_plain and not is_wide and all(op is None for op in sources.values()):
            plain |= {n.removesuffix(".weight"): x.name for n in sources} or {x.name: x.name}
        elif x.kind != "Conv1D" and _STACKED not in sources.values():
            others.append(x.name)
            fused |= {*sources} if x.kind == "experts" else set()
    operations = {n: (t.rpartition(".")[0], op) for t, sources in stored.items() for n, op in sources.items()}
    joined = {n for n, (_, op) in operations.items() if op not in (None, _ALONE) and n.endswith(".weight")}
    experts = {n: module for n, (module, op) in operations.items() if n in joined and op == _STACKED}
    needed = _initialised_by_name(model, {*plain.values()})
    plain |= {n.removesuffix(".weight"): module for n, module in experts.items()}
    return LinearModules(
        plain=tuple(plain),
        others=tuple(dict.fromkeys(others)),
        tables=frozenset(n.rpartition(".")[0] for t in embeddings(model) for n in stored.get(f"{t}.weight", ())),
        in_model={name: other for name, other in plain.items() if name != other},
        experts=experts,
        fused=frozenset(fused),
        joined=frozenset(joined),
        unpackable=frozenset(f"{n}.weight" for n, module in plain.items() if module in needed),
        family=str(checkpoint.config.get("model_type")),
    )


def _initialised_by_name(model: Any, names: Iterable[str]) -> set[str]:
    """The modules of `names` whose `weight` the model's `_init_weights` uses without a check that it exists.

    transformers 5.24 calls it for every module of a model that it opens, even if all weights are in the files. `model`
    is on the meta device, and is incomplete afterwards.
    """
    modules = {name: model.get_submodule(name) for name in names}
    weights = {module: module._parameters.pop("weight") for module in modules.values()}
    for module in model.modules():
        module._is_hf_initialized = False
    with quiet_transformers(), suppress(Exception):  # other errors have nothing to do with packed weights
        while True:
            try:
                model.initialize_weights()
                break
            except AttributeError as e:  # of the first such weight; the next call goes on from there
                owner: Any = e.obj
                owner._parameters["weight"] = weights.pop(owner)
    return {name for name, module in modules.items() if module not in weights}


def tied_names(checkpoint: Checkpoint, names: Iterable[str]) -> list[set[str]]:
    """Groups of stored tensors that are one weight in the model. Raises UnsupportedError if it cannot be built."""
    model: Any = empty_model(checkpoint)
    stored, groups = _stored_names(model, names), dict[str, set[str]]()
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, {*stored.get(source, ())}).update(stored.get(target, ()))
    return list(groups.values())


def _stored_names(model: Any, names: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """For each tensor of a model, the stored tensors that transformers builds it from and its first operation on each.

    The operation is None if a tensor is used as stored, and `_ALONE` if a scale next to it would not be renamed with
    it.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    first = {p: type(c.operations[0]).__name__ for c in converters for p in c.source_patterns}
    state = model.state_dict()
    sources: dict[str, dict[str, str | None]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        renamed, beside = (rename_source_key(n, renamings, [])[0] for n in (name, f"{name}_scale"))
        alone = None if beside == f"{renamed}_scale" else _ALONE
        if target in state:
            sources.setdefault(target, {})[name] = alone if pattern is None else first[pattern]
    return sources


def check_memory(num_parameters: int, *, copies: int, what: str) -> None:
    """Raise ResourceError unless memory holds `copies` of a model in fp32."""
    needed = 4 * num_parameters * copies
    available = available_memory()
    if needed > available:
        raise ResourceError(
            f"{what} in fp32 needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free",
            hint="free some memory, or use a larger machine",
            details={"needed_bytes": needed, "available_bytes": available},
        )
