"""`lpconv advise` as a library call: cheap checks first, before torch and transformers are imported."""

from collections.abc import Callable
from pathlib import Path

from lpconv.advise.candidates import coded, convert_options
from lpconv.advise.options import NO_TEXT, AdviseOptions, check_advise
from lpconv.data.texts import check_reads_text, check_seq_len, check_tokenizer, num_positions
from lpconv.layouts.reader import open_readable
from lpconv.options import with_keywords
from lpconv.plan.settings import fill_options
from lpconv.progress import Deadline, Progress, Silent
from lpconv.results import AdviceResult
from lpconv.storage.checkpoint import Openable
from lpconv.train.data import check_data


@with_keywords(AdviseOptions)
def advise(
    model: Openable,
    output: Path | str,
    options: AdviseOptions,
    *,
    progress: Progress | None = None,
    keep: Callable[[AdviceResult], object] = lambda result: None,
    command: str | None = None,
) -> AdviceResult:
    """Gain and cost of low precision for `model`, measured on text within the minutes of the budget.

    `keep` receives the result so far after each measurement, marked as interrupted. Raises an `LpconvError` for a model
    or data that cannot be measured at all; a failing candidate becomes a row with that status.
    """
    output = Path(output)
    deadline = Deadline(60 * options.budget.minutes, progress or Silent())
    check_advise(options)
    if options.bits is not None:
        fill_options(convert_options(coded(options.bits)))  # raises its errors
    check_data(options.training("fp32", steps=options.steps))
    checkpoint = open_readable(model, revision=options.revision)
    checkpoint.check_apart(output)
    check_reads_text(checkpoint.config, hint=NO_TEXT)
    check_tokenizer(checkpoint.directory)
    check_seq_len(options.seq_len, num_positions(checkpoint.config))
    check_data(options.training("fp32", steps=options.steps), checkpoint)
    deadline.message(f"measuring {checkpoint.origin.name}, {options.budget.minutes:g} minutes at most")
    from lpconv.advise.study import study  # imports torch and transformers (seconds)

    return study(checkpoint, output, options, deadline, keep, command)
