"""`lpconv init`."""

from typing import Annotated

import typer

from lpconv.cli.command import Json, Output, output_of, print_next, print_result
from lpconv.data.texts import check_reads_text
from lpconv.errors import UnsupportedError
from lpconv.init.options import InitOptions


def init(
    model: Annotated[
        str,
        typer.Argument(
            help="An architecture: the name of a preset such as bert-base, a config.json, or any MODEL with --reinit.",
            metavar="ARCHITECTURE",
        ),
    ],
    options: InitOptions,
    output: Output = None,
    json: Json = False,
) -> None:
    """Draw a fresh unit-scaled model, to train from scratch in fp8 or fp16.

    [bold]Examples[/bold]
      lpconv init demo --reinit --width 64 --layers 2 -o fresh
      lpconv init bert-base --tokenizer google-bert/bert-base-uncased -o bert-native
      lpconv finetune ./fresh --recipe native-fp8 --steps 200
    """
    from lpconv.cli.progress import progress_for
    from lpconv.init import run
    from lpconv.report.convert import convert_document
    from lpconv.storage.contents import read_json
    from lpconv.train.options import OWN_LOOP

    target = output_of(output, model, options.method)
    with progress_for() as progress:
        result = run.init(model, target, options, progress=progress)
    print_result(result, convert_document, json=json)
    if not json:
        shares = ", ".join(f"{share:.0%} of {what}" for what, share in result.unit_shares.items())
        print_next(f"\nTensors with an RMS in [1/2, 2]: {shares}" if shares else "")
        recipe = "native-fp8" if options.method == "native" else "fp32"
        try:
            check_reads_text(read_json(target / "config.json"), hint=OWN_LOOP, allow_pairs=True)
            print_next(f"To train it: lpconv finetune {target} --recipe {recipe}")
        except UnsupportedError as e:
            print_next(f"To train it, {e.hint}")
