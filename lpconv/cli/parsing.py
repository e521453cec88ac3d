"""Parse the words of a command: options by other names, and flags of other tools."""

import difflib
import itertools
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

# Accepted without being shown, with dashes or underscores: flags of other commands and of earlier versions.
_SILENT = {"--output-dir": "--output", "--batch": "--batch-size", "--seq": "--seq-len"}
_MODEL = "--model"
# Flags of transformers, llm-compressor, optimum, mlx-lm, llama.cpp and auto-round, and what to write instead: the first
# option that the command has.
_USUAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dtype", "torch-dtype"), ("--format", "--precision")),
    "outtype": ("--scheme GGUF_Q8_0", "--precision"),
    **dict.fromkeys(("quantize", "quantization", "q-mode", "algorithm"), ("--scheme", "--recipe")),
    **dict.fromkeys(("bits", "q-bits", "w-bit", "wbits", "num-bits", "weight-format"), ("--format int4", "--recipe")),
    **dict.fromkeys(("group-size", "q-group-size", "q-group"), ("--granularity group:64",)),
    **dict.fromkeys(("out", "outfile", "out-dir", "mlx-path", "save-dir", "save-path"), ("--output", "--save")),
    **dict.fromkeys(("learning-rate", "peak-lr"), ("--lr",)),
    **dict.fromkeys(("per-device-train-batch-size", "train-batch-size", "bs"), ("--batch-size",)),
    **dict.fromkeys(("num-train-epochs", "epochs"), ("--steps, in updates",)),
    **dict.fromkeys(("max-steps", "iters"), ("--steps",)),
    **dict.fromkeys(("max-seq-length", "max-seq-len", "max-length", "seqlen"), ("--seq-len",)),
    **dict.fromkeys(("dataset", "dataset-name", "train-file", "calib-data"), ("--data", "--calibrate")),
    **dict.fromkeys(("nsamples", "num-samples", "num-calibration-samples"), ("--calibration-tokens, in tokens",)),
    **dict.fromkeys(("lora-rank", "lora-r"), ("--lora",)),
    "fp16": ("--format fp16", "--recipe amp-fp16"),
    "bf16": ("--format bf16", "--recipe amp-bf16"),
    "sym": ("--scheme",),
    "ignore": ("--exclude",),
    "warmup-ratio": ("--warmup",),
    "lr-scheduler-type": ("--schedule",),
    "max-grad-norm": ("--clip",),
    "gradient-accumulation-steps": ("--grad-accum",),
    "report-to": ("--log-to",),
    "save-steps": ("--save-every",),
    "eval-steps": ("--eval-every",),
    **dict.fromkeys(("overwrite", "overwrite-output-dir"), ("--force",)),
    "resume-from-checkpoint": ("--resume",),
    **dict.fromkeys(("model-name-or-path", "hf-path", "model-id", "model-path", "pretrained"), ("MODEL",)),
}


def help_text(command: Callable[..., None]) -> str:
    """The docstring of a command for its help page: a line for each paragraph and each example."""
    text, heading, examples = str(command.__doc__).partition("[bold]")
    title, *lines = examples.strip().split("\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    return "\n\n".join([*paragraphs, heading + title, "\n".join(line.strip() for line in lines)])


class HelpPage:
    """A part of commands: their help page shows no type for flags."""

    def get_params(self, context: Any) -> list[Any]:
        """The parameters of the command."""
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]  # of the class that this one is mixed into
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(HelpPage, TyperCommand):
    """A command that also takes `--model X` for its first argument, and answers flags of other tools with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, but name the option of this command in the error for a flag of another tool."""
        try:
            return super().parse_args(ctx, self._usual(args))
        except Exception as e:
            if hasattr(e, "possibilities"):  # the error for an unknown option, which typer does not export
                self._answer(e)
            raise

    def _usual(self, args: list[str]) -> list[str]:
        """The arguments with the usual spelling of options, and the value of `--model` first."""
        known, model, usual = self._options(), list[str](), list[str]()
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            ours = _SILENT.get(name.replace("_", "-"), name.replace("_", "-"))
            if not name.startswith("--") or name in known or ours not in {*known, _MODEL}:
                usual.append(word)
            elif ours == _MODEL:
                model += [value] if equals else [*itertools.islice(words, 1)]
            else:
                usual.append(ours + equals + value)
        return [*model, *usual]

    def _answer(self, error: Any) -> None:
        """Let the error for an unknown option name the option of this command, if other tools have that flag."""
        known = self._options() | {"MODEL"}
        typed = error.option_name.removeprefix("--").replace("_", "-")
        ours = next((o for o in _USUAL.get(typed, ()) if o.split()[0].rstrip(",") in known), None)
        if ours is None:
            error.possibilities = difflib.get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)
        else:
            ours = ours if "," in ours else ours.replace(" ", ", such as ")
            name = "takes the model as MODEL, without an option" if ours == "MODEL" else f"has {ours}"
            error.message, error.possibilities = f"{error.option_name}: lpconv {name}", None

    def _options(self) -> set[str]:
        return {name for p in self.params for name in (*p.opts, *p.secondary_opts)}
