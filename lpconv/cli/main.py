"""The `lpconv` command and its first screen. Starting it, and any `--help`, imports neither torch nor transformers."""

import gc
import importlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from lpconv.cli.handling import Commands, handle_failures
from lpconv.cli.parsing import Command, help_text
from lpconv.cli.progress import VERBOSE
from lpconv.machine import own_stdout
from lpconv.version import __version__

# By panel of the help. Each is a module in this package with a function or group of the same name.
PANELS = {
    "Start here": ("demo", "advise", "inspect", "doctor"),
    "Make it smaller": ("convert", "verify", "attest", "restore", "merge", "export"),
    "Train": ("finetune", "probe", "init"),
    "Measure and automate": ("bench", "report", "batch"),
}
COMMANDS = {name: panel for panel, names in PANELS.items() for name in names}
# README.md has the same table; a test compares the two.
QUESTIONS = {
    "What would low precision save and cost?": "lpconv advise MODEL",
    "Make it smaller": "lpconv convert MODEL --format e4m3fn",
    "Serve it with vLLM": "lpconv convert MODEL --scheme FP8_DYNAMIC",
    "Keep more of it in 4 bits": "lpconv convert MODEL --scheme W4A16 --rounding gptaq --calibrate self",
    "Merge a LoRA adapter into codes": "lpconv merge CODES ADAPTER --data FILE",
    "Train without fp32 copies of the weights": "lpconv finetune MODEL --recipe collage-bf16",
    "What would fp8 lose, and where?": "lpconv probe MODEL",
    "Is it faster on this machine?": "lpconv bench MODEL",
    "Is this quantised checkpoint valid?": "lpconv inspect PATH",
    "Does this output still match its source?": "lpconv verify PATH --against MODEL",
    "How do its outputs differ on my text?": "lpconv verify PATH --against MODEL --data FILE",
    "Does it still answer questions as well?": "lpconv verify PATH --against MODEL --tasks NAME",
    "What does my machine support?": "lpconv doctor",
}
# torch reads these on import; its profiler, used for measuring memory, would print stages and warnings to stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Objects created between two garbage collections: importing torch and transformers creates half a million, and the
# default of 700 would collect a thousand times, a fifth of the import time.
_OBJECTS = 20_000
# Loggers of libraries that transformers imports if installed; users cannot act on their warnings.
_TALKATIVE = ("torchao", "torch.utils._pytree")


class _LazyCommands(Mapping[str, Any]):
    """Mapping of command names to commands. Each is imported on first use, so start-up pays only for one."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        command = getattr(importlib.import_module(f"lpconv.cli.{name}"), name)
        if not isinstance(command, typer.Typer):
            alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
            alone.command(name, cls=Command, help=help_text(command))(handle_failures(command))
            command = alone
        found = typer.main.get_command(command)
        found.rich_help_panel = COMMANDS[name]  # type: ignore[attr-defined]  # typer's commands have it
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Program(Commands):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _LazyCommands()  # type: ignore[assignment]  # nothing writes to it


app = typer.Typer(
    name="lpconv",
    cls=_Program,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make Hugging Face models smaller or train them in low precision, and see the cost.",
    epilog="Start with [bold]lpconv demo[/bold]. Exit codes are listed in docs/cli.md.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lpconv {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log each phase on stderr, and show tracebacks of errors.")
    ] = False,
) -> None:
    """Make Hugging Face models smaller or train them in low precision, and see the cost."""
    VERBOSE.set(verbose)
    if context.invoked_subcommand is None:
        typer.echo(first_screen())
        raise typer.Exit
    if not verbose:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)


def run() -> None:
    """Entry point of the console script."""
    sys.stdout = own_stdout()
    gc.set_threshold(_OBJECTS)
    app()


def first_screen() -> str:
    """Text that `lpconv` prints if no command is given."""
    return (
        f"lpconv {__version__} makes Hugging Face models smaller, or trains them in low\n"
        f"precision, and shows the cost.\n\n{_commands(QUESTIONS)}\n\n"
        "MODEL is a directory, a URL, a name on the Hugging Face hub, or demo, a small\n"
        "model that is included. Try it: lpconv demo. All commands: lpconv --help."
    )


def next_steps() -> str:
    """Commands to try after the demo, for the user's own model."""
    return f"With a model of your own:\n\n{_commands(dict(list(QUESTIONS.items())[:5]))}"


def _commands(questions: dict[str, str]) -> str:
    """A line for each question and its command, or two on a terminal that is too narrow for one."""
    width = max(map(len, questions))
    lines = [f"  {question:<{width}}  {command}" for question, command in questions.items()]
    if max(map(len, lines)) > shutil.get_terminal_size((120, 0)).columns:
        lines = [f"{question}\n  {command}" for question, command in questions.items()]
    return "\n".join(lines)
