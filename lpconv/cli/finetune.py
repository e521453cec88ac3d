"""`lpconv finetune`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lpconv.cli.options import Force, Json, Model, Output, Quiet, Resume
from lpconv.convert.options import parse_size
from lpconv.train.options import SAVES, SCHEDULES, TASKS, TWINS, FinetuneOptions
from lpconv.train.recipes import LOSS_SCALES, PRECISIONS, RECIPES, TRAINING_METHODS, TRAINING_OPTIMIZERS, arithmetic

__all__ = ["finetune"]

_HOW, _DATA, _TRAIN, _CHECK = "Arithmetic", "Data", "Training", "Twin and diagnostics"


def _list_recipes(wanted: bool) -> None:
    if not wanted:
        return
    from lpconv.report.finetune.terminal import render_recipes
    from lpconv.report.terminal import show

    parts = {n: r.arithmetic for n, r in RECIPES.items()}
    show(
        render_recipes(
            {n: (a.precision, a.method, a.optimizer, a.loss_scale, RECIPES[n].purpose) for n, a in parts.items()}
        )
    )
    raise typer.Exit


def finetune(
    model: Model,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A named arithmetic, see --list-recipes (default: unit-fp8). The next options replace its parts.",
            autocompletion=lambda: list(RECIPES),
            rich_help_panel=_HOW,
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help=", ".join(PRECISIONS), rich_help_panel=_HOW)
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help=", ".join(TRAINING_METHODS), rich_help_panel=_HOW)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help=", ".join(TRAINING_OPTIMIZERS), rich_help_panel=_HOW)
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            "--rounding", help="nearest or stochastic: how bf16 weights are written back.", rich_help_panel=_HOW
        ),
    ] = None,
    loss_scale: Annotated[
        str | None,
        typer.Option("--loss-scale", help=", ".join(LOSS_SCALES) + ", or a number.", rich_help_panel=_HOW),
    ] = None,
    loss_scale_floor: Annotated[
        str | None,
        typer.Option(
            "--loss-scale-floor",
            help="The smallest loss scale from each step on, such as 0:1,40000:8192.",
            metavar="STEP:SCALE,…",
            rich_help_panel=_HOW,
        ),
    ] = None,
    critical: Annotated[
        list[str] | None,
        typer.Option(
            "--critical",
            help="Modules that keep 16-bit products in scaled fp8, such as '*.down_proj'. Repeatable.",
            metavar="PATTERN",
            rich_help_panel=_HOW,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the scales of method unit on the first batches (default: from theory).",
            rich_help_panel=_HOW,
        ),
    ] = False,
    list_recipes: Annotated[
        bool,
        typer.Option(
            "--list-recipes", callback=_list_recipes, is_eager=True, help="Show the recipes.", rich_help_panel=_HOW
        ),
    ] = False,
    task: Annotated[str, typer.Option("--task", help=", ".join(TASKS), rich_help_panel=_DATA)] = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A txt, jsonl, csv, tsv or parquet file, or a data set on the hub; by default plays in lpconv.",
            metavar="FILE",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_data: Annotated[
        str | None,
        typer.Option("--eval-data", help="Held-out data (default: a tenth).", metavar="FILE", rich_help_panel=_DATA),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option("--text-column", help="The column of texts.", rich_help_panel=_DATA)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option("--label-column", help="The column of classes or targets.", rich_help_panel=_DATA)
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens in a sequence (default: 128).", min=2, rich_help_panel=_DATA),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps.", min=1, rich_help_panel=_TRAIN)] = 100,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Sequences in a step.", min=1, rich_help_panel=_TRAIN)
    ] = 8,
    lr: Annotated[float, typer.Option("--lr", help="The highest learning rate.", rich_help_panel=_TRAIN)] = 5e-5,
    schedule: Annotated[str, typer.Option("--schedule", help=", ".join(SCHEDULES), rich_help_panel=_TRAIN)] = "linear",
    warmup: Annotated[
        float, typer.Option("--warmup", help="Share of the steps in which lr rises.", rich_help_panel=_TRAIN)
    ] = 0.1,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", help="Decoupled.", min=0, rich_help_panel=_TRAIN)
    ] = 0.01,
    beta2: Annotated[float, typer.Option("--beta2", help="Of the second moment.", rich_help_panel=_TRAIN)] = 0.999,
    clip: Annotated[
        float, typer.Option("--clip", help="Largest gradient norm; 0 for any.", min=0, rich_help_panel=_TRAIN)
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The first seed.", min=0, rich_help_panel=_TRAIN)] = 0,
    save_every: Annotated[
        int | None,
        typer.Option(
            "--save-every", help="Steps between checkpoints (default: a fifth; 0: none).", min=0, rich_help_panel=_TRAIN
        ),
    ] = None,
    save: Annotated[
        str, typer.Option("--save", help=", ".join(SAVES) + ": the form of the model.", rich_help_panel=_TRAIN)
    ] = "converted",
    compile: Annotated[bool, typer.Option("--compile", help="With torch.compile.", rich_help_panel=_TRAIN)] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory", help="Refuse what is estimated to need more, such as 8GB.", rich_help_panel=_TRAIN
        ),
    ] = None,
    log_to: Annotated[
        list[str] | None,
        typer.Option("--log-to", help="tensorboard, wandb, trackio … Repeatable.", rich_help_panel=_TRAIN),
    ] = None,
    twin: Annotated[str, typer.Option("--twin", help=", ".join(TWINS), rich_help_panel=_CHECK)] = "fp32",
    seeds: Annotated[
        int, typer.Option("--seeds", help="Repeat with so many seeds, for the noise.", min=1, rich_help_panel=_CHECK)
    ] = 1,
    eval_every: Annotated[
        int | None,
        typer.Option(
            "--eval-every", help="Steps between evaluations (default: a quarter).", min=0, rich_help_panel=_CHECK
        ),
    ] = None,
    eval_batches: Annotated[
        int, typer.Option("--eval-batches", help="Of each evaluation, at most.", min=1, rich_help_panel=_CHECK)
    ] = 16,
    track_every: Annotated[
        int | None,
        typer.Option(
            "--track-every",
            help="Steps between records of underflow (default: a tenth; 0: none).",
            min=0,
            rich_help_panel=_CHECK,
        ),
    ] = None,
    lca: Annotated[
        bool,
        typer.Option("--lca", help="Loss change by layer, and what rounding took of it.", rich_help_panel=_CHECK),
    ] = False,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="A condition such as 'loss_gap<=0.05'. Repeatable; exit code 5 where one fails.",
            metavar="CONDITION",
            rich_help_panel=_CHECK,
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    output: Output = None,
    resume: Resume = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a model in low precision, beside a high-precision twin, and say what precision cost.

    [bold]Examples[/bold]

      lpconv finetune demo --recipe unit-fp8 --steps 10

      lpconv finetune ./bert --recipe collage-bf16 --task classification --data reviews.jsonl --seeds 3

      lpconv finetune gpt2 --precision fp8 --method unit --optimizer collage-plus --data corpus.txt

      torchrun --nproc-per-node 2 -m lpconv finetune gpt2 --recipe collage-bf16
    """
    options = FinetuneOptions(
        arithmetic=arithmetic(
            recipe=recipe,
            precision=precision,
            method=method,
            optimizer=optimizer,
            rounding=rounding,
            loss_scale=loss_scale,
            loss_scale_floor=loss_scale_floor,
        ),
        task=task,
        data=data,
        eval_data=eval_data,
        text_column=text_column,
        label_column=label_column,
        steps=steps,
        batch_size=batch_size,
        seq_len=seq_len,
        lr=lr,
        schedule=schedule,
        warmup=warmup,
        weight_decay=weight_decay,
        beta2=beta2,
        clip=clip,
        seed=seed,
        seeds=seeds,
        twin=twin,
        eval_every=eval_every,
        eval_batches=eval_batches,
        save_every=save_every,
        track_every=track_every,
        lca=lca,
        calibrate=calibrate,
        critical=tuple(critical or ()),
        save=save,
        log_to=tuple(log_to or ()),
        compile=compile,
        max_memory=parse_size(max_memory) if max_memory else None,
        gates=tuple(gate or ()),
        revision=revision,
        resume=resume,
        force=force,
    )
    from lpconv.cli.training_bars import training_progress
    from lpconv.report.finetune.terminal import render_finetune
    from lpconv.report.terminal import show
    from lpconv.results import json_text, to_json
    from lpconv.train import run
    from lpconv.train.folder import default_output
    from lpconv.train.gates import gate_problem
    from lpconv.train.processes import is_main_process

    target = Path(output) if output else default_output(model, options.arithmetic.name)
    command = shlex.join(["lpconv", *sys.argv[1:]])
    is_main = is_main_process()
    with training_progress(quiet=quiet or not is_main) as telling:
        result = run.finetune(model, target, options, telling=telling, command=command)
    if not is_main:
        return
    error = gate_problem(result)
    if not json:
        show(render_finetune(result))
        print(
            f"\nThe page with plots is {target / 'report.html'}; the model opens with from_pretrained({str(target)!r})."
        )
    elif error is None:
        print(json_text(result), end="")
    if error is not None:  # under --json its details hold the result
        error.details["result"] = to_json(result)
        raise error
