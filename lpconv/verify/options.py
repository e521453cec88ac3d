"""Options of `lpconv verify`. Plain Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from lpconv.options import Option, TrustRemoteCode, gate_option


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `lpconv verify`."""

    against: Annotated[str | None, Option("Source to compare with", default="the recorded source", metavar="MODEL")] = (
        None
    )
    level: Annotated[
        str | None,
        Option(
            "What to check: hash, weights (every stored element), logits (outputs of both models), or values, which "
            "compares the weights of any two checkpoints, even in different layouts",
            default="hash; with --against weights, and logits if small; values for third-party checkpoints",
            choices=("hash", "weights", "logits", "values"),
        ),
    ] = None
    gates: Annotated[
        tuple[str, ...],
        gate_option(
            "Fail with exit code 5 unless this holds, such as 'top1>=0.99' or 'task:arc_easy:acc_drop<=0.01'",
            kind="verify",
        ),
    ] = ()
    tasks: Annotated[
        tuple[str, ...],
        Option(
            "Tasks of lm-eval on which to compare the answers of both models: names, task files (.yaml), or folders "
            "of task files (./FOLDER)",
            comma=True,
            metavar="NAME,…",
        ),
    ] = ()
    task_limit: Annotated[int | None, Ge(1), Option("Largest number of questions per task", default="all")] = None
    data: Annotated[
        Path | None,
        Option(
            "Text file on which to compare the outputs of both models, which are streamed layer by layer; inputs of "
            "layers are rounded if readers of the output round them",
            metavar="FILE",
            parse=Path,
            is_path=True,
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        Ge(2),
        Option("Number of tokens per window of the text", default="128, or the model's maximum if less"),
    ] = None
    max_tokens: Annotated[int, Ge(1), Option("Largest number of tokens to read")] = 4096
    detect: Annotated[
        float | None,
        Ge(1e-6),  # less would need billions of windows
        Option("Report how many questions, or windows of --data, show this drop of a score, or rise of the loss"),
    ] = None
    attestation: Annotated[
        Path | None,
        Option("Statement by `lpconv attest` to check the files against", metavar="FILE", parse=Path, is_path=True),
    ] = None
    strict: Annotated[bool, Option("Fail for warnings, such as weights that were rounded unlike their siblings")] = (
        False
    )
    trust_remote_code: TrustRemoteCode = False
