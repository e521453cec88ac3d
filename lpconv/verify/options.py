"""Options of `lpconv verify`. Plain Python."""

from dataclasses import dataclass
from pathlib import Path

from annotated_types import Ge

from lpconv.options import TrustRemoteCode, gate_option, option


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `lpconv verify`."""

    against: str | None = option(None, "Source to compare with", default="the recorded source", metavar="MODEL")
    level: str | None = option(
        None,
        "What to check: hash, weights (every stored element), logits (outputs of both models), or values, which "
        "compares the weights of any two checkpoints, even in different layouts",
        default="hash; with --against weights, and logits if small; values for third-party checkpoints",
        choices=("hash", "weights", "logits", "values"),
    )
    gates: tuple[str, ...] = option(
        (),
        gate_option(
            "Fail with exit code 5 unless this holds, such as 'top1>=0.99' or 'task:arc_easy:acc_drop<=0.01'",
            kind="verify",
        ),
    )
    tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-eval on which to compare the answers of both models: names, task files (.yaml), or folders "
        "of task files (./FOLDER)",
        comma=True,
        metavar="NAME,…",
    )
    task_limit: int | None = option(None, "Largest number of questions per task", Ge(1), default="all")
    data: Path | None = option(
        None,
        "Text file on which to compare the outputs of both models, which are streamed layer by layer; inputs of "
        "layers are rounded if readers of the output round them",
        metavar="FILE",
        parse=Path,
        is_path=True,
    )
    seq_len: int | None = option(
        None, "Number of tokens per window of the text", Ge(2), default="128, or the model's maximum if less"
    )
    max_tokens: int = option(4096, "Largest number of tokens to read", Ge(1))
    detect: float | None = option(
        None,
        "Report how many questions, or windows of --data, show this drop of a score, or rise of the loss",
        Ge(1e-6),  # less would need billions of windows
    )
    attestation: Path | None = option(
        None, "Statement by `lpconv attest` to check the files against", metavar="FILE", parse=Path, is_path=True
    )
    strict: bool = option(False, "Fail for warnings, such as weights that were rounded unlike their siblings")
    trust_remote_code: TrustRemoteCode = False
