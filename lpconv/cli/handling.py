"""Turn exceptions and signals into messages and exit codes."""

import contextlib
import functools
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ParamSpec

from typer.core import TyperGroup

from lpconv.cli.command import Quiet, Verbose, with_options
from lpconv.cli.parsing import HelpPage
from lpconv.cli.progress import QUIET, VERBOSE
from lpconv.errors import InterruptedRunError, LpconvError, ResourceError, UsageError, from_system
from lpconv.machine import available_memory, free_addresses, out_of_memory
from lpconv.report.printable import printable

P = ParamSpec("P")
# MB that a command's libraries need before it opens a model; with less, a container would kill it without a message.
_LIBRARIES_MB = {
    "advise": 500, "probe": 400, "bench": 400, "onnx": 500, "finetune": 500, "merge": 500, "init": 500,
}  # fmt: skip
# MB that importing torch maps (620 for a CPU build), for commands that use it. If the address space ends during that
# import, some libraries abort the process, and others lose the error.
_ADDRESSES_MB = 700
_WITHOUT_TORCH = ("attest", "inspect", "report", "doctor", "batch")


# Commands of other tools, and ours.
_ELSEWHERE = {
    **dict.fromkeys(("quantize", "quantise", "compress"), "convert"), **dict.fromkeys(("eval", "evaluate"), "verify"),
    "train": "finetune", "dequantize": "restore", "help": "--help",
}  # fmt: skip


class _Terminated(BaseException):
    """Raised when SIGTERM arrives."""


class Commands(HelpPage, TyperGroup):
    """Group of commands that also reports parser errors as JSON under --json."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command as typer does, but answer the name that it has in other tools with ours."""
        if args[0] not in self.commands and args[0] in _ELSEWHERE:
            ctx.fail(f"No such command '{args[0]}'. lpconv has {_ELSEWHERE[args[0]]}.")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run as typer does, but report a wrong option or argument as a JSON document under --json."""
        args = list(sys.argv[1:] if args is None else args)
        if "--json" not in args or not extra.get("standalone_mode", True):
            return super().main(args, *rest, **extra)
        try:
            sys.exit(super().main(args, *rest, **{**extra, "standalone_mode": False}) or 0)
        except Exception as e:
            if not hasattr(e, "format_message"):  # click's errors have this method; typer may bring its own click
                raise
            message = e.format_message() or "a command is missing"
            _fail(UsageError(message, hint="run with --help to list commands and options"), as_json=True)


def handle_failures(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: a failure becomes one message on stderr, a JSON document under --json, and an exit code.

    Typer gets its options one by one. The command also gets `--quiet` and `--verbose`.
    """
    command = with_options(command)
    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in {"quiet": Quiet, "verbose": Verbose}.items()
    ]

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json"))
        quiet, verbose = (bool(kwargs.pop(p.name, False)) for p in added)
        VERBOSE.set(VERBOSE.get() or verbose)
        QUIET.set(quiet)
        try:
            with _raise_on_sigterm():
                _check_memory(command.__name__)
                command(*args, **kwargs)
                sys.stdout.flush()
        except LpconvError as e:
            if VERBOSE.get():
                traceback.print_exc()
            _fail(e, as_json)
        except KeyboardInterrupt:
            _fail(_interruption(signal.SIGINT, kwargs), as_json)
        except _Terminated:
            _fail(_interruption(signal.SIGTERM, kwargs), as_json)
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output has exited; Python would complain while closing stdout
            sys.exit(141)
        except Exception as e:
            known = out_of_memory(e) or from_system(e)
            if known is not None:
                _fail(known, as_json)
            traceback.print_exc()
            bug = LpconvError(
                f"{type(e).__name__}: {e}", hint="this is a bug in lpconv; please report it with the output above"
            )
            _fail(bug, as_json)

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]  # `inspect` reads it
    run.__annotations__ = command.__annotations__ | {p.name: p.annotation for p in added}
    return run


def _check_memory(command: str) -> None:
    addresses = free_addresses()
    if addresses is not None and addresses < _ADDRESSES_MB * 10**6 and command not in _WITHOUT_TORCH:
        raise ResourceError(
            f"`{command}` needs {_ADDRESSES_MB} MB of address space for libraries; {addresses / 1e6:.0f} MB are left",
            hint="raise the address-space limit (`ulimit -v`), or limit the memory of a container instead",
            details={"needed_bytes": _ADDRESSES_MB * 10**6, "available_bytes": addresses},
        )
    needed, available = _LIBRARIES_MB.get(command, 0) * 10**6, available_memory()
    if needed > available:
        raise ResourceError(
            f"`{command}` needs {needed / 1e6:.0f} MB of memory before it opens a model; "
            f"{available / 1e6:.0f} MB are free",
            hint="free some memory, or raise the limit of the container or process",
            details={"needed_bytes": needed, "available_bytes": available},
        )


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Context manager that raises `_Terminated` on SIGTERM, and restores the previous handler at the end.

    Python drops an exception that is raised while an object is deleted; then the signal is sent again.
    """
    before, report_dropped = signal.signal(signal.SIGTERM, _terminate), sys.unraisablehook

    def send_again(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, _Terminated):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            report_dropped(dropped)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        sys.unraisablehook = report_dropped


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _interruption(number: int, kwargs: dict[str, object]) -> InterruptedRunError:
    resumable = "resume" in kwargs and not kwargs.get("dry_run")
    return InterruptedRunError(number, hint="run the same command with --resume to continue" if resumable else None)


def _fail(error: LpconvError, as_json: bool) -> None:
    try:
        if as_json:
            document = {"schema_version": 1, "error": error.to_dict()}
            if "jobs" in error.details:  # of a batch, in the place where they are if no job fails
                document["jobs"] = error.details["jobs"]
            print(json.dumps(document, indent=2, default=str))
        sys.stdout.flush()
    except OSError:  # the reader has exited or the disk is full; Python would complain while closing stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    text = f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
    # Escaped, since it may quote names from an untrusted file; in one piece, since other processes may write too.
    sys.stderr.write("\n".join(map(printable, text.split("\n"))))
    sys.stderr.flush()
    sys.exit(error.exit_code)
