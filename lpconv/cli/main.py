"""The `lpconv` command. Starting it, and every `--help`, imports neither torch nor transformers."""

import logging
import os
from typing import Annotated

import typer

from lpconv.cli.advise import advise
from lpconv.cli.batch import batch
from lpconv.cli.bench import bench
from lpconv.cli.convert import convert
from lpconv.cli.demo import demo
from lpconv.cli.doctor import doctor
from lpconv.cli.export import export
from lpconv.cli.finetune import finetune
from lpconv.cli.handling import Commands, handled
from lpconv.cli.init import init
from lpconv.cli.inspect import inspect
from lpconv.cli.probe import probe
from lpconv.cli.progress import VERBOSE
from lpconv.cli.questions import first_screen
from lpconv.cli.repair import repair
from lpconv.cli.report import report
from lpconv.cli.restore import restore
from lpconv.cli.verify import verify
from lpconv.version import __version__

__all__ = ["app", "main", "run"]

# torch reads them when it is imported; its profiler, which measures memory, would write stages and warnings to stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Loggers of libraries that transformers imports where they are installed; no user of ours can mend what they warn of.
_TALKATIVE = ("torchao", "torch.utils._pytree")

app = typer.Typer(
    name="lpconv",
    cls=Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrite Hugging Face checkpoints into low-precision forms that still are the model.",
    epilog="Start with [bold]lpconv demo[/bold]. Exit codes are listed in docs/cli.md.",
)

for command in (
    advise, convert, inspect, verify, restore, repair, init, probe, finetune, bench, report, batch, doctor, demo,
):  # fmt: skip
    app.command()(handled(command))
app.add_typer(export)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lpconv {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A line on stderr for each phase; tracebacks with errors.")
    ] = False,
) -> None:
    """Rewrite Hugging Face checkpoints into low-precision forms that still are the model."""
    VERBOSE.set(verbose)
    if context.invoked_subcommand is None:
        typer.echo(first_screen())
        raise typer.Exit
    if not verbose:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)


def run() -> None:
    """The console script."""
    app()
