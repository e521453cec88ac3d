"""`lpconv probe`."""

from lpconv.cli.command import Json, Model, Output, Quiet, print_result, with_options
from lpconv.cli.progress import progress_for
from lpconv.probe.options import ProbeOptions

__all__ = ["probe"]


@with_options
def probe(model: Model, options: ProbeOptions, output: Output = None, json: Json = False, quiet: Quiet = False) -> None:
    """Run a model forward and backward in fp32 and show what low-precision formats would lose, layer by layer.

    The output directory (NAME-probe) gets a page and the histograms, from which `lpconv report --what-if` answers for
    any format.

    [bold]Examples[/bold]

      lpconv probe gpt2 --steps 2

      lpconv probe gpt2 --calibrate

      lpconv probe ./bert-large --data corpus.txt --batch-size 4 -o bert-probe
    """
    from lpconv.cli.early import before_probe, output_of

    target = output_of(output, model, "probe")
    before_probe(model, target, options)
    # torch and transformers, from here on, take seconds to import
    from lpconv.convert.tensor_records import format_ranges
    from lpconv.probe.answers import answer
    from lpconv.probe.checkpoint import calibrate_checkpoint, probe_checkpoint
    from lpconv.probe.record import write_output
    from lpconv.report.probe.html import html_probe
    from lpconv.report.probe.terminal import render_probe
    from lpconv.scaled.disk import CALIBRATION_FILE, write_factors

    with progress_for(quiet=quiet) as progress:
        result = probe_checkpoint(model, options, progress=progress)
        factors = calibrate_checkpoint(model, options, progress=progress) if options.calibrate else None
    answers = answer(result)
    write_output(target, result, html_probe(answers, format_ranges()))
    if factors is not None:
        write_factors(target, factors)
    print_result(answers, render_probe, json=json)
    if json:
        return
    print(f"\nThe page with plots is {target / 'report.html'}.")
    if factors is not None:
        print(f"The scales of {len(factors)} edges are in {target / CALIBRATION_FILE}.")
    print(f"For another format: lpconv report {target} --what-if e3m2")
