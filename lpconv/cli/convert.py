"""`lpconv convert`."""

from typing import Annotated, Any

from lpconv.cli.command import Json, Model, Output, listing, output_of, print_result, typed_command
from lpconv.errors import UsageError
from lpconv.formats.spec import CODED
from lpconv.layouts import SCHEMES
from lpconv.options import Option
from lpconv.plan.options import ConvertOptions

_ListSchemes: Any = listing(
    "--list-schemes",
    "List the schemes and exit.",
    ("Scheme", "Bits", "<Opened by", "<When to use it"),
    lambda: ((name, f"{s.bits:g}", s.opens, s.use) for name, s in SCHEMES.items()),
)


def convert(
    model: Model,
    *,
    output: Output = None,
    options: ConvertOptions,
    list_schemes: _ListSchemes = False,
    dry_run: Annotated[bool, Option("Show the plan without writing anything")] = False,
    measure: Annotated[
        bool, Option("With --dry-run and --rounding gptq or gptaq, round the first layer to estimate the time")
    ] = False,
    shard: Annotated[
        str | None,
        Option("Write only part i of n, as one of n workers, such as 2/5", metavar="I/N", panel="How to run"),
    ] = None,
    finish: Annotated[
        bool, Option("Combine the parts of all workers, verify them and publish the output", panel="How to run")
    ] = False,
    pack: Annotated[
        bool,
        Option(
            "Only store all weights in fewer bytes, without loss; lpconv reads them, and `lpconv restore` writes the "
            "same files again"
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write a low-precision copy of a checkpoint, verify it, and report what it costs.

    [bold]Examples[/bold]
      lpconv convert ./llama --scheme FP8_DYNAMIC -o llama-fp8
      lpconv convert bert-large --method unit
      lpconv convert ./llama --method unit --format e4m3fn --gate 'sqnr>=25' -o llama-unit
      lpconv convert ./llama --method collage --residual exact16
      lpconv convert ./llama --bits 3.7
      lpconv convert ./llama --pack -o llama-packed
      lpconv convert gpt2 --dry-run
    """
    from lpconv.cli.progress import progress_for
    from lpconv.convert import parts, run
    from lpconv.convert.pack import pack as pack_checkpoint
    from lpconv.convert.parts import Part
    from lpconv.layouts.reader import open_readable
    from lpconv.plan.settings import fill_options
    from lpconv.plan.suited import suited_options
    from lpconv.report.convert import convert_document, part_document, plan_document
    from lpconv.report.numbers import size_text
    from lpconv.results import json_text

    if sum((dry_run, shard is not None, finish)) > 1:
        raise UsageError("--dry-run, --shard and --finish cannot be combined", hint="pass only one of them")
    if measure and not dry_run:
        raise UsageError("--measure estimates a conversion that is not run", hint="add --dry-run, or leave it out")
    if pack:
        if shard is not None or finish or measure:
            raise UsageError("--pack writes all files in one run", hint="leave --shard, --finish and --measure out")
        target = str(output_of(output, model, "packed"))
        with progress_for() as progress:
            packed = pack_checkpoint(model, target, options, dry_run=dry_run, progress=progress)
        if json:
            print(json_text(packed), end="")
            return
        verb = "would become" if dry_run else "became"
        print(f"{size_text(packed.bytes.read)} {verb} {size_text(packed.bytes.written)} in {packed.output}")
        return
    filled = fill_options(options)  # raises its errors before a model is opened
    if output is None and options.scheme is None:
        filled, _ = suited_options(options, open_readable(model, revision=options.revision))
    content = f"{filled.budget_bits:g} bits" if filled.format == CODED.name else filled.format
    words = [options.scheme] if options.scheme else [filled.method, content]
    target = output or str(output_of(output, model, *words))
    if dry_run:
        with progress_for(shown=measure) as progress:
            planned = run.plan(model, target, options, measure=measure, progress=progress)
        print_result(planned, plan_document, json=json)
        return
    with progress_for() as progress:
        if shard is not None:
            part = parts.convert_part(model, target, options, Part.parse(shard), progress=progress)
            print_result(part, part_document, json=json)
            return
        result = (run.finish if finish else run.convert)(
            model, target, options, progress=progress, command=typed_command()
        )
    print_result(result, convert_document, json=json)
