"""`lpconv convert`."""

import functools
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Force, Json, Model, Output, Quiet, Resume, Revision, TrustRemoteCode
from lpconv.convert.options import GRANULARITIES, LAYOUTS, VERIFY_LEVELS, ConvertOptions, parse_rule, parse_size
from lpconv.formats.spec import FORMATS
from lpconv.methods import METHODS

__all__ = ["convert"]

_RESIDUALS = sorted({r for m in METHODS.values() for r in m.residuals})
_METHOD_FORMATS = [f for f in FORMATS if any(f in m.formats for m in METHODS.values())]
# Options by the panel of the help that they stand in.
_what = functools.partial(typer.Option, rich_help_panel="What to write")
_check = functools.partial(typer.Option, rich_help_panel="Checks")
_how = functools.partial(typer.Option, rich_help_panel="How to run")


def convert(
    model: Model,
    method: Annotated[
        str, _what("--method", "-m", help=", ".join(METHODS), autocompletion=lambda: list(METHODS))
    ] = "unit",
    format: Annotated[
        str | None,
        _what(
            "--format",
            "-f",
            "--element",
            help=", ".join(_METHOD_FORMATS) + " (default: fp16, collage bf16, multipoint int4)",
            autocompletion=lambda: list(_METHOD_FORMATS),
        ),
    ] = None,
    output: Output = None,
    residual: Annotated[
        str | None,
        _what(
            "--residual",
            help="Collage: how the lost bits are kept: " + ", ".join(_RESIDUALS) + " (default: bf16)",
            autocompletion=lambda: list(_RESIDUALS),
        ),
    ] = None,
    layout: Annotated[
        str,
        _what(
            "--layout",
            help="lpconv, or compressed-tensors (e4m3fn): plain transformers with that package and vLLM open it.",
            autocompletion=lambda: list(LAYOUTS),
        ),
    ] = "lpconv",
    scale: Annotated[str, _what("--scale", help="Scales are powers of two (pow2) or exact.")] = "pow2",
    granularity: Annotated[
        str,
        _what(
            "--granularity",
            help="What has a scale of its own, a tensor or a row.",
            autocompletion=lambda: list(GRANULARITIES),
        ),
    ] = "tensor",
    budget_bits: Annotated[
        float | None,
        _what(
            "--budget-bits",
            help="Multipoint: stored bits per element, scales included (default: half a bit above the format's)",
        ),
    ] = None,
    points_max: Annotated[
        int | None, _what("--points-max", help="Multipoint: most points of a row (default: 3)")
    ] = None,
    include: Annotated[
        list[str] | None,
        _what(
            "--include",
            help="Convert only tensors that match this glob, or re:EXPRESSION. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, _what("--exclude", help="Keep tensors that match. Repeatable.", metavar="PATTERN")
    ] = None,
    rule: Annotated[
        list[str] | None,
        _what(
            "--rule",
            help="A format, or keep, for the tensors that match. Repeatable; the first match decides.",
            metavar="PATTERN=FORMAT",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None, _what("--max-shard-size", help="Such as 5GB (default: as the source)", metavar="SIZE")
    ] = None,
    verify: Annotated[
        str,
        _check(
            "--verify",
            help=", ".join(VERIFY_LEVELS) + ". auto runs both models where they are small.",
            autocompletion=lambda: list(VERIFY_LEVELS),
        ),
    ] = "auto",
    gate: Annotated[
        list[str] | None,
        _check("--gate", help="A condition to publish, such as 'sqnr>=25'. Repeatable.", metavar="CONDITION"),
    ] = None,
    revision: Revision = None,
    max_memory: Annotated[str | None, _how("--max-memory", help="Such as 4GB.", metavar="SIZE")] = None,
    workers: Annotated[int | None, _how("--workers", help="Encoder threads (default: cores, at most 8)", min=1)] = None,
    dry_run: Annotated[bool, _how("--dry-run", help="Show the plan and write nothing.")] = False,
    resume: Resume = False,
    force: Force = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a checkpoint into a low-precision form, verify it, and report.

    [bold]Examples[/bold]

      lpconv convert bert-large --method unit

      lpconv convert ./llama --method unit --format e4m3fn --gate 'sqnr>=25' -o llama-fp8

      lpconv convert ./llama --method collage --residual exact16

      lpconv convert ./llama --method multipoint --element int4 --budget-bits 4.5

      lpconv convert gpt2 --dry-run
    """
    options = ConvertOptions(
        method=method,
        format=format,
        residual=residual,
        layout=layout,
        scale=scale,
        budget_bits=budget_bits,
        granularity=granularity,
        points_max=points_max,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        rules=tuple(parse_rule(r) for r in rule or ()),
        revision=revision,
        max_memory=parse_size(max_memory) if max_memory else None,
        workers=workers,
        max_shard_size=parse_size(max_shard_size) if max_shard_size else None,
        verify=verify,
        gates=tuple(gate or ()),
        resume=resume,
        force=force,
        trust_remote_code=trust_remote_code,
    )
    from lpconv.cli.progress import progress_for
    from lpconv.convert import run
    from lpconv.report.convert.terminal import render_convert, render_plan
    from lpconv.report.terminal import show
    from lpconv.results import json_text

    target = Path(output) if output else run.default_output(model, options)
    if dry_run:
        planned = run.plan(model, target, options)
        print(json_text(planned), end="") if json else show(render_plan(planned))
        return
    command = shlex.join(["lpconv", *sys.argv[1:]])
    with progress_for(quiet=quiet) as progress:
        result = run.convert(model, target, options, progress=progress, command=command)
    print(json_text(result), end="") if json else show(render_convert(result))
