"""`lpconv finetune`."""

from collections.abc import Iterator
from typing import Annotated, Any

from lpconv.cli.command import Json, Model, Output, listing, output_of, print_next, print_result, typed_command
from lpconv.options import Option
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import RECIPES


def _recipes() -> Iterator[tuple[str, ...]]:
    for name, recipe in RECIPES.items():
        a = recipe.arithmetic
        yield name, a.precision, a.method, a.optimizer, a.loss_scale, recipe.purpose


_COLUMNS = ("Recipe", "<Precision", "<Method", "<Optimizer", "<Loss scale", "<What it is for")
_ListRecipes: Any = listing("--list-recipes", "List the recipes and exit.", _COLUMNS, _recipes)


def finetune(
    model: Model,
    *,
    output: Output = None,
    options: FinetuneOptions,
    list_recipes: _ListRecipes = False,
    dry_run: Annotated[
        bool, Option("Estimate the memory of a step on each GPU from config.json, without training")
    ] = False,
    json: Json = False,
) -> None:
    """Fine-tune a model in low precision and in fp32, and report the difference.

    [bold]Examples[/bold]
      lpconv finetune demo --recipe unit-fp8 --steps 10
      lpconv finetune ./bert --recipe collage-bf16 --task classification --data reviews.jsonl --seeds 3
      lpconv finetune gpt2 --precision fp8 --method unit --optimizer collage-plus --data corpus.txt
      lpconv finetune llama-70b --dry-run --seq-len 2048
      torchrun --nproc-per-node 2 -m lpconv finetune gpt2 --recipe collage-bf16
    """
    from lpconv.cli.progress import progress_for
    from lpconv.machine import is_first_process
    from lpconv.report.finetune import finetune_document, memory_document
    from lpconv.results import to_json
    from lpconv.train import run
    from lpconv.train.outcome import gate_problem

    if dry_run:
        print_result(run.plan(model, options), memory_document, json=json)
        return
    target, is_main = output_of(output, model, options.arithmetic.name, "finetuned"), is_first_process()
    with progress_for(shown=is_main) as progress:
        result = run.finetune(model, target, options, progress=progress, command=typed_command())
    if not is_main:
        return
    error = gate_problem(result)
    if error is None or not json:  # otherwise the error's details hold the result
        print_result(result, finetune_document, json=json)
    if not json:
        opening = "PeftModel.from_pretrained(model, " if options.arithmetic.lora else "from_pretrained("
        print_next(f"\nReport: {target / 'report.html'}\nTo open the model: {opening}{str(target)!r})")
    if error is not None:
        error.details["result"] = to_json(result)
        raise error
