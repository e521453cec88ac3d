"""`lpconv probe`."""

from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Force, Json, Model, Output, Quiet, Revision
from lpconv.cli.progress import progress_for

__all__ = ["probe"]


def probe(
    model: Model,
    data: Annotated[
        str | None,
        typer.Option("--data", help="A text file; by default plays that ship with lpconv.", metavar="FILE"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Forward and backward passes.", min=1)] = 4,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences in a batch.", min=1)] = 8,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens in a sequence; by default 128, or the model's most.", min=2),
    ] = None,
    every: Annotated[int, typer.Option("--every", help="Record every so many steps.", min=1)] = 1,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also write the scales that unit scaling should use (calibration.json).")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="For masks and random ids.")] = 0,
    revision: Revision = None,
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a model forward and backward in fp32 and show what low-precision formats would lose, layer by layer.

    The output directory (NAME-probe) gets the histograms, which `lpconv report` answers for any format, and a page.

    [bold]Examples[/bold]

      lpconv probe gpt2 --steps 2

      lpconv probe gpt2 --calibrate

      lpconv probe ./bert-large --data corpus.txt --batch-size 4 -o bert-probe
    """
    from lpconv.convert.ranges import format_ranges
    from lpconv.probe.answers import answer
    from lpconv.probe.calibrate import calibrate_checkpoint
    from lpconv.probe.checkpoint import probe_checkpoint
    from lpconv.probe.options import ProbeOptions
    from lpconv.probe.output import check_free, default_output, write_output
    from lpconv.report.probe.html import html_probe
    from lpconv.report.probe.terminal import render_probe
    from lpconv.report.terminal import show
    from lpconv.results import json_text
    from lpconv.scaled.disk import CALIBRATION_FILE, write_factors

    target = Path(output) if output else default_output(model)
    check_free(target, force=force)
    options = ProbeOptions(
        data=Path(data) if data else None,
        steps=steps,
        batch_size=batch_size,
        seq_len=seq_len,
        every=every,
        seed=seed,
        revision=revision,
    )
    with progress_for(quiet=quiet) as progress:
        result = probe_checkpoint(model, options, progress=progress)
        factors = calibrate_checkpoint(model, options, progress=progress) if calibrate else None
    answers = answer(result)
    write_output(target, result, html_probe(answers, format_ranges()))
    if factors is not None:
        write_factors(target, factors)
    if json:
        print(json_text(answers), end="")
        return
    show(render_probe(answers))
    print(f"\nThe page with plots is {target / 'report.html'}.")
    if factors is not None:
        print(f"The scales of {len(factors)} edges are in {target / CALIBRATION_FILE}.")
    print(f"For another format: lpconv report {target} --what-if e3m2")
