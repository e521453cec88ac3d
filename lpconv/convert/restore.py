"""`lpconv restore` as a library call: cheap checks first, before torch is imported."""

from pathlib import Path

from lpconv.convert.pack import is_packed, unpack
from lpconv.errors import UsageError
from lpconv.formats.spec import SPELLINGS
from lpconv.layouts.reader import open_readable
from lpconv.lookup import known_name
from lpconv.progress import Progress, Silent
from lpconv.results import RestoreResult
from lpconv.storage.header import quantization_method
from lpconv.storage.staging import check_apart, check_free, check_is_output, is_output

_DTYPES = ("fp32", "bf16", "fp16")


def restore(
    directory: Path | str,
    output: Path | str,
    *,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Write the plain checkpoint of a converted or third-party quantised checkpoint into `output`.

    A packed checkpoint becomes its source again. An output of lpconv gets the shards, side files, config and dtypes of
    its source; a third-party checkpoint gets `dtype` (default: the config's). Raises InputError for a directory that is
    neither, or whose files do not match SHA256SUMS; UnsupportedError for plain checkpoints and unknown layouts.
    """
    directory, output, progress = Path(directory), Path(output), progress or Silent()
    check_apart(directory, output)
    if dtype is None and is_packed(directory):
        return unpack(directory, output, force=force, progress=progress)
    checkpoint = None if is_output(directory) or not directory.exists() else open_readable(directory)
    is_foreign = checkpoint is not None and quantization_method(checkpoint.config) is not None
    dtype = known_name(dtype, _DTYPES, SPELLINGS) or dtype if dtype is not None else None
    if dtype is not None and (not is_foreign or dtype not in _DTYPES):
        ours = "outputs of lpconv are always restored in the dtypes of their source"
        hint = f"use {', '.join(_DTYPES)}" if is_foreign else ours
        raise UsageError(f"--dtype {dtype} does not apply to this checkpoint", hint=hint)
    if not is_foreign:
        check_is_output(directory)
    check_free(output, force=force)
    # The imports below load torch (seconds).
    from lpconv.convert.decode import decode_checkpoint, restore_ours

    if checkpoint is not None and is_foreign:
        return decode_checkpoint(checkpoint, output, dtype=dtype, force=force, progress=progress)
    return restore_ours(directory, output, force=force, progress=progress)
