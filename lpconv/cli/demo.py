"""`lpconv demo`."""

from pathlib import Path

from lpconv.cli.command import Json, Target, print_next, print_result, write_page
from lpconv.cli.main import next_steps
from lpconv.cli.progress import progress_for
from lpconv.errors import OutputExistsError
from lpconv.options import Force

# One run per method, and fp8 next to fp16 so that the comparison shows the cost of a format.
_RUNS = (("unit", "fp32"), ("unit", "fp16"), ("unit", "e4m3fn"), ("scalify", "fp16"), ("collage", "bf16"))


def demo(output: Target = "lpconv-demo", force: Force = False, json: Json = False) -> None:
    """Convert the included model with every method, and compare the results. Takes less than a minute, offline.

    [bold]Example[/bold]
      lpconv demo -o my-demo
    """
    from lpconv.convert.run import convert
    from lpconv.plan.options import ConvertOptions
    from lpconv.report.compare import run_names
    from lpconv.report.convert import compare_conversions
    from lpconv.storage.partfile import check_writable
    from lpconv.storage.staging import is_unused

    folder = Path(output)
    check_writable(folder)
    names = {"report.html", *("-".join(run) for run in _RUNS)}  # and the partial folders of a killed run
    is_ours = folder.is_dir() and all(p.name in names or p.stem in names for p in folder.iterdir())
    if not is_unused(folder) and not (is_ours and force):
        hint = "replace it with --force, or choose another --output" if is_ours else "choose another --output"
        raise OutputExistsError(
            f"`{folder}` exists" + ("" if is_ours else " and `lpconv demo` did not write it"), hint=hint
        )
    results = []
    with progress_for() as progress:
        for method, fmt in _RUNS:
            progress.message(f"converting the demo model: {method} {fmt}")
            options = ConvertOptions(method=method, format=fmt, verify="logits", force=force)
            command = f"lpconv convert demo --method {method} --format {fmt} --verify logits"
            results.append(convert("demo", folder / f"{method}-{fmt}", options, progress=progress, command=command))
    page = folder / "report.html"
    compared = compare_conversions(results, run_names([r.output for r in results]))
    write_page(str(page), compared)
    print_result(results, lambda _: compared, json=json)
    if not json:
        print_next(f"\nComparison with plots: {page}\nEach run has its own report.html next to its model.")
        print_next(f"\n{next_steps()}")
