"""`lpconv advise`."""

from lpconv.advise.options import AdviseOptions
from lpconv.cli.command import Json, Model, Output, output_of, print_next, print_result, typed_command


def advise(model: Model, options: AdviseOptions, output: Output = None, json: Json = False) -> None:
    """Measure what low precision would save and cost for a model, and recommend what to do.

    The output directory (NAME-advice) gets a page with plots, the figures as JSON, and jobs.yaml for `lpconv batch`.
    What has been measured is kept when the time is up, and on Ctrl-C and SIGTERM.

    [bold]Examples[/bold]
      lpconv advise demo --budget minutes=1
      lpconv advise ./llama --for infer --data corpus.txt --budget quality=0.02
      lpconv advise ./bert --for train --data reviews.jsonl --budget memory=40GB,minutes=30
    """
    from lpconv.advise.record import MANIFEST, PAGE, save_results
    from lpconv.advise.run import advise as measure
    from lpconv.cli.progress import progress_for
    from lpconv.report.advise import advice_document

    target = output_of(output, model, "advice")
    with save_results(
        target, options, lambda partial: None if json else print_result(partial, advice_document, json=False)
    ) as keep:
        with progress_for() as progress:
            result = measure(model, target, options, progress=progress, keep=keep, command=typed_command())
        keep(result)
    print_result(result, advice_document, json=json)
    if json:
        return
    print_next(f"\nReport: {target / PAGE}")
    if any(r.row for r in result.recommendations):
        print_next(f"To run the recommended jobs: lpconv batch {target / MANIFEST}")
