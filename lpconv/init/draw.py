"""Draw a fresh model: config, weights, one training step as a check, and the output."""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lpconv.convert.run import convert
from lpconv.errors import InputError, ResourceError, UnsupportedError
from lpconv.init.architecture import PLAIN, Architecture, resize_config
from lpconv.init.options import InitOptions
from lpconv.models.empty import check_memory
from lpconv.models.inputs import example_inputs, vocabulary_size
from lpconv.models.opening import Blueprint, config_of, model_errors
from lpconv.models.presets import PRESETS
from lpconv.models.tasks import architecture, resolve_auto_class
from lpconv.models.tokenizer import read_tokenizer
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Progress, quiet_transformers
from lpconv.report.markdown import code_span
from lpconv.report.printable import printable
from lpconv.results import InitResult
from lpconv.scaled.choices import NATIVE_MARK
from lpconv.scaled.model import scaled, scaling_of
from lpconv.scaled.native import data_sizes, initialise
from lpconv.scaled.pair import Role
from lpconv.scaled.tensor import scaled_tensor
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.partfile import write_small, writing
from lpconv.storage.resolve import resolve
from lpconv.storage.staging import is_locked, try_lock

_COPIES = 4  # copies in memory: weights, their data under native scaling, gradients, intermediate results
# Entries of a config that describe the weights it was stored with.
_NOT_KEPT = {"dtype", "torch_dtype", "auto_map", "quantization_config", NATIVE_MARK}
_HINT = "lpconv builds the models that the installed transformers knows"
_FEWEST = 0.8  # fraction of well-scaled tensors below which init warns


def draw(architecture: Architecture, output: Path, options: InitOptions, progress: Progress) -> InitResult:
    """Write a fresh checkpoint of an architecture to `output`. Raises the errors of `lpconv.init.init`."""
    blueprint = _blueprint(architecture, options)
    with model_errors("no model can be built from config.json", hint=_HINT):
        count = sum(p.numel() for p in blueprint.build_empty().parameters())
    check_memory(count, copies=_COPIES, what="a fresh model")
    with _folder_next_to(output) as folder:
        source = folder / f"{output.name}-seed{options.seed}"
        progress.start("drawing weights", 0)
        fresh = _draw_model(blueprint, options)
        with quiet_transformers():
            fresh.save_pretrained(source)
            _copy_tokenizer(options.tokenizer, architecture.place, source)
        write_small(source / "README.md", _card(architecture.name, type(fresh).__name__, count, options))
        shares: dict[str, float] = {}
        if options.method == "native":
            progress.start("one step under native scaling", 0)
            shares = _unit_shares(fresh)
        del fresh
        as_unit = ConvertOptions(method="unit", format="fp32", verify="weights", force=options.force)
        result = convert(str(source), output, as_unit, progress=progress, names_source=False)
        fields = {**vars(result), "warnings": (*result.warnings, *_share_warnings(shares))}
        return InitResult(**fields, unit_shares=shares)


def _blueprint(arch: Architecture, options: InitOptions) -> Blueprint:
    """The class and config of the model to draw. Raises UnsupportedError if no model can be built from config.json."""
    with quiet_transformers(), model_errors("no model can be built from config.json", hint=_HINT):
        settings = arch.settings
        if settings is None:
            preset = PRESETS[arch.name].config().to_dict()
            settings = resize_config(preset, width=options.width, layers=options.layers)
        if not settings.get("architectures"):
            raise UnsupportedError("config.json names no architecture", hint="add the class name under `architectures`")
        settings = {k: v for k, v in settings.items() if k not in _NOT_KEPT}
        config = config_of(settings)
        config.dtype = torch.float32
        return Blueprint(model_class=resolve_auto_class(architecture(settings), config), config=config, checkpoint=None)


def _draw_model(blueprint: Blueprint, options: InitOptions) -> Any:
    """The model with its weights, which depend on the seed only."""
    with (
        quiet_transformers(),
        model_errors("no model can be built from config.json", hint=_HINT),
        torch.random.fork_rng([]),
    ):
        torch.manual_seed(options.seed)
        model = blueprint.model_class(blueprint.config)
        if options.method == "native":
            try:
                initialise(model, seed=options.seed)
            except UnsupportedError as e:
                raise UnsupportedError(e.message, hint=PLAIN) from e
    return model


def _unit_shares(model: Any) -> dict[str, float]:
    """Fractions of outputs, gradients and weight gradients whose data have a size within [1/2, 2] under native scaling.

    Runs one step on random inputs, from a random normal output gradient instead of a loss; `model` cannot be used
    afterwards. Raises UnsupportedError for an operator without a native rule, for a model that does not run, and for
    sizes that are not finite.
    """
    scaled(model, method="native", strict=True)
    scaling = scaling_of(model.train())
    assert scaling is not None

    def step() -> None:
        inputs = example_inputs(model)
        padding: Any = getattr(model.config, "pad_token_id", None)  # its zero embedding gives norms huge gradients
        for name, ids in inputs.items() if isinstance(padding, int) else ():
            if name.endswith("input_ids"):
                ids[ids == padding] = (padding + 1) % vocabulary_size(model.config)
        outputs = super(type(model), model).forward(**inputs)  # still scaled
        first = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
        unit = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
        first.backward(scaled_tensor(unit, 1.0, role=Role.GRADIENT, numerics=scaling.numerics))

    try:
        with quiet_transformers(), model_errors("the model fails when it runs", hint=_HINT):
            sizes = data_sizes(model, step)
    except UnsupportedError as e:
        raise UnsupportedError(e.message, hint=PLAIN) from e
    if not all(math.isfinite(size) for values in sizes.values() for size in values):
        raise UnsupportedError("a fresh native model of this architecture overflows in fp32", hint=PLAIN)
    return {what: sum(0.5 <= s <= 2 for s in values) / max(1, len(values)) for what, values in sizes.items()}


def _share_warnings(shares: dict[str, float]) -> list[str]:
    """Warnings about fractions below `_FEWEST`. No error, since values and gradients are exact for any scale."""
    few = ", ".join(f"{share:.0%} of {what}" for what, share in shares.items() if share < _FEWEST)
    advice = "fp8 may lose precision in others: use native-fp16, or native-fp8 with --operand-scale tensor"
    return [f"only {few} have an RMS in [1/2, 2]; {advice}"] if few else []


def _copy_tokenizer(named: str | None, place: str | Path | Checkpoint, target: Path) -> None:
    """Copy the tokenizer of the `named` model, or else of the architecture; presets and config files have none.

    Raises InputError if a named model has none, and ResourceError if the folder cannot hold one.
    """
    if named in PRESETS:
        named, place = None, str(named)
    if named is not None:
        directory: Path | None = resolve(named).directory
    else:
        directory = place.directory if isinstance(place, Checkpoint) else None
    tokenizer = read_tokenizer(directory) if directory is not None else None
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(target)
        except UnicodeEncodeError as e:
            raise ResourceError(
                "tokenizers cannot be written to a folder whose path is not UTF-8", hint="choose another --output"
            ) from e
    elif named is not None:
        raise InputError(f"`{named}` has no tokenizer", hint="pass a model that has one to --tokenizer")


@contextlib.contextmanager
def _folder_next_to(output: Path) -> Iterator[Path]:
    """A temporary folder on the disk of `output`; also removes such folders of killed runs."""
    place = output.absolute()
    prefix = f".lpconv-init-{place.name[:200]}-"
    with writing(output):
        place.parent.mkdir(parents=True, exist_ok=True)
        stale_folders = [p for p in place.parent.iterdir() if p.name.startswith(prefix) and not is_locked(p)]
        temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent)
        descriptor = os.open(temporary.name, os.O_RDONLY)
    try:
        try_lock(descriptor)
        for killed in stale_folders:
            shutil.rmtree(killed, ignore_errors=True)
        with temporary as folder:
            yield Path(folder)
    finally:
        os.close(descriptor)


def _card(model: str, name: str, count: int, options: InitOptions) -> str:
    """README.md of the initial weights."""
    how = "by native unit scaling" if options.method == "native" else "as transformers initialises it"
    size = "".join(f", {n} {v}" for n, v in (("width", options.width), ("layers", options.layers)) if v is not None)
    source = code_span(printable(Path(model).name))
    return (
        f"# {name}, not trained\n\n{count} parameters of the architecture of {source}{size}, "
        f"drawn {how} from seed {options.seed}.\n"
    )
