"""`lpconv merge`."""

from typing import Annotated

import typer
from annotated_types import Ge, Gt

from lpconv.cli.command import Json, Output, output_of
from lpconv.options import Force, Option, Resume, gate_option
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic


def merge(
    path: Annotated[str, typer.Argument(help="An output of `lpconv convert` with codes and scales.", metavar="CODES")],
    adapter: Annotated[str, typer.Argument(help="A folder with a LoRA adapter, as PEFT saves it.", metavar="ADAPTER")],
    data: Annotated[str, Option("Text that the adapter was trained on, or like it", metavar="FILE")],
    output: Output = None,
    steps: Annotated[int, Ge(1), Option("Number of optimizer steps")] = 200,
    batch_size: Annotated[int, Ge(1), Option("Number of sequences per step")] = 8,
    seq_len: Annotated[int | None, Ge(2), Option("Number of tokens per sequence", default="128")] = None,
    lr: Annotated[float | None, Gt(0), Option("Peak learning rate", default="by the number of scales")] = None,
    gates: Annotated[
        tuple[str, ...],
        gate_option("Fail with exit code 5 unless this holds, such as 'update_kept>=0.9'", kind="finetune"),
    ] = (),
    resume: Resume = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Merge a LoRA adapter into codes, and report how much of its update they keep.

    Scales or codes are trained towards the predictions of the model with the adapter, because rounding the merged
    weights loses small updates.

    [bold]Examples[/bold]
      lpconv merge ./llama-w4a16 ./adapter --data chats.jsonl -o llama-merged --gate 'update_kept>=0.9'
    """
    from lpconv.cli.finetune import finetune
    from lpconv.errors import InputError
    from lpconv.train.recoverable import is_adapter

    if not is_adapter(adapter):
        raise InputError(f"`{adapter}` has no adapter_config.json", hint="pass the folder of a PEFT adapter")
    options = FinetuneOptions(
        arithmetic=arithmetic(recover=True, precision="fp32"), source=adapter, data=data, steps=steps, lr=lr,
        batch_size=batch_size, seq_len=seq_len, gates=gates or (), resume=resume, force=force,
    )  # fmt: skip
    finetune(path, output=str(output_of(output, path, "merged")), options=options, json=json)
