"""`lpconv probe`."""

from lpconv.cli.command import Json, Model, Output, output_of, print_next, print_result
from lpconv.cli.progress import progress_for
from lpconv.probe.options import ProbeOptions


def probe(model: Model, options: ProbeOptions, output: Output = None, json: Json = False) -> None:
    """Run training steps in fp32 and show what low-precision formats would lose, layer by layer.

    The output directory (NAME-probe) gets a page and the histograms, from which `lpconv report --what-if` answers for
    any format.

    [bold]Examples[/bold]
      lpconv probe gpt2 --steps 2
      lpconv probe gpt2 --calibrate
      lpconv probe ./bert-large --data corpus.txt --batch-size 4 -o bert-probe
    """
    from lpconv.probe.run import run_probe
    from lpconv.report.probe import probe_document

    target = output_of(output, model, "probe")
    with progress_for() as progress:
        _, answers = run_probe(model, target, options, progress=progress)
    print_result(answers, probe_document, json=json)
    if json:
        return
    print_next(f"\nReport: {target / 'report.html'}")
    if options.calibrate:
        from lpconv.scaled.disk import CALIBRATION_FILE  # torch is imported by now

        print_next(f"Scales for method unit: {target / CALIBRATION_FILE}")
    print_next(f"To see another format: lpconv report {target} --what-if e3m2")
