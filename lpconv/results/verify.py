"""Records of verifications (of a conversion or by `lpconv verify`), and of gates."""

import math
from dataclasses import dataclass

from lpconv.results.advise import GapEstimate
from lpconv.results.documents import Result, Shown


@dataclass(frozen=True, kw_only=True)
class HashCheck:
    """Comparison of files with SHA256SUMS, or with the subjects of an attestation."""

    num_files: int
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FilesCheck:
    """Comparison of config, tokenizer and other small files with those of another checkpoint.

    `different` describes the values that differ; `not_compared` lists the files and keys that were not judged.
    """

    compared: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightsCheck:
    """Comparison of stored weights with the source. `min_sqnr_db` belongs to tensor `worst`; infinite means exact.

    `num_elements_checked` of `num_elements` were converted again, and their decoded values compared with the reference
    cast. `miss_probability` is the probability that a single bad block is not among them.
    """

    max_rel_error: float
    min_sqnr_db: float
    worst: str | None
    num_tensors: int
    num_elements_checked: int
    num_elements: int | None = None
    miss_probability: float | None = None
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FeedbackCheck:
    """Comparison of `num_scales` recorded scales of inputs, keys and values with those of a second calibration.

    `wrong` describes those that differ. `skipped` says which records were not checked, including codes that were chosen
    by error feedback or training.
    """

    num_scales: int = 0
    wrong: tuple[str, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """What transformers holds after opening a checkpoint: tensors of the model, and parameters that the files lack.

    `different` are the tensors that are not those that lpconv reads from the same files; `error` says why the
    checkpoint cannot be opened at all.
    """

    model_class: str | None = None
    num_tensors: int = 0
    error: str | None = None
    missing: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpenedCheck:
    """Source and result, each opened by transformers and compared with lpconv's reading of the same files.

    A model that transformers could not be asked about is None, and `not_asked` says why.
    """

    source: OpenedModel | None = None
    result: OpenedModel | None = None
    not_asked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Comparison of the outputs of source and result on the same inputs. Figures are None if it was `skipped`.

    `max_abs_diff` and `rel_error` (‖y - ŷ‖/‖y‖) are over all outputs that are finite in the source, and are infinite or
    NaN if the result's are; `top1_agreement` is the share of positions with the same top output; `mean_kl` is KL(source
    ‖ result) in nats per position. On a text, `reverse_kl` is KL(result ‖ source), the perplexities are of the next
    token, and `loss_gap` is the rise of its loss in nats, over windows; None if the model does not predict it. Inputs
    of the result's layers are rounded as its readers do: `rounded_inputs` says to what, such as "e4m3fn per token",
    None if they are not rounded.
    """

    max_abs_diff: float | None = None
    rel_error: float | None = None
    bit_equal: bool | None = None
    top1_agreement: float | None = None
    mean_kl: float | None = None
    reverse_kl: float | None = None
    perplexity: float | None = None
    source_perplexity: float | None = None
    loss_gap: GapEstimate | None = None
    model_class: str | None = None
    inputs: str | None = None
    is_text: bool = False
    rounded_inputs: str | None = None
    skipped: str | None = None

    @property
    def problem(self) -> str | None:
        """Description of outputs that are not finite although the source's are; None also if they were not compared."""
        is_finite = self.max_abs_diff is None or math.isfinite(self.max_abs_diff)
        return None if is_finite else "outputs are NaN or infinite, unlike the source's"


@dataclass(frozen=True, kw_only=True)
class TaskCheck:
    """Scores of both models in one `metric` of an lm-eval task, on the same `num_questions`.

    `drop` is how much worse the result answers than the source, as a mean of paired differences; None if the score is
    not a mean over questions. For metrics that are 0 or 1, `num_lost` questions are right only in the source, and
    `num_won` only in the result. `rounded_inputs` is that of `LogitsCheck`.
    """

    task: str
    metric: str
    num_questions: int
    score: float
    source_score: float
    drop: GapEstimate | None = None
    num_lost: int | None = None
    num_won: int | None = None
    rounded_inputs: str | None = None


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """One ``--gate``: its expression, the measured value, and whether it passed.

    `detectable` is the smallest difference that the measurement could have shown, if it is one of two models.
    """

    expression: str
    value: float | None
    passed: bool
    detectable: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundingCheck:
    """How the codes of a weight were rounded, given the scales of the file.

    Of the codes, `num_second` are the second neighbours of their weight in the source and `num_further` are further
    away; `num_far` groups of 32 are on average more than a step away. This is what `kind` of rounding leaves:
    "nearest", "tuned", "feedback" or "unknown". `least_column` is the smallest share of these codes in a column,
    `place` says where they cluster, and `unusual` how the weight differs from its siblings. `scales` is what the
    scales are consistent with: "amax" (the largest weight of each group), "search" or "unknown"; "" if they were not
    judged.
    """

    num_codes: int
    num_second: int
    num_further: int
    num_far: int = 0
    kind: str
    least_column: float = 0.0
    place: str = ""
    unusual: str = ""
    scales: str = ""

    @property
    def turned(self) -> float:
        """Share of codes that are not the nearest."""
        return (self.num_second + self.num_further) / self.num_codes


@dataclass(frozen=True, kw_only=True)
class ComparedTensor:
    """Comparison of one weight with a reference in any form. `num_off` of `num_groups` groups have a wrong factor.

    If the conversion was repeated instead, there are no groups: the stored weight is right, or `problem` says why not.
    On a text, `input_sqnr_db` is the error of rounded inputs, and `output_sqnr_db` that of the layer's output from the
    same inputs: rounded, times the stored weight, against the inputs times the reference's weight.
    """

    name: str
    stored_as: str
    reference: str
    sqnr_db: float
    max_rel_error: float
    num_groups: int = 0
    num_off: int = 0
    problem: str | None = None
    input_sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    rounding: RoundingCheck | None = None


LOST_DB = 3.0  # SQNR up to which a tensor has lost its signal: the error has half its energy; zeros have 0 dB


@dataclass(frozen=True, kw_only=True)
class VerifyResult(Shown):
    """The outcome of a verification. `level` is the deepest level that ran; `problems` describe the failures.

    `warnings` do not fail it: tensors that lost their signal, and records that were not checked. `feedback` is set for
    outputs of error feedback, training or calibration. `tensors` are the compared ones, worst first; at the level
    ``values``, which compares any two checkpoints, of both.
    """

    level: str
    passed: bool
    attestation: HashCheck | None = None
    hash: HashCheck | None = None
    files: FilesCheck | None = None
    weights: WeightsCheck | None = None
    feedback: FeedbackCheck | None = None
    opened: OpenedCheck | None = None
    logits: LogitsCheck | None = None
    tasks: tuple[TaskCheck, ...] = ()
    gates: tuple[GateRecord, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tensors: tuple[ComparedTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verification(Result, VerifyResult):
    """Result of `lpconv verify` on the output or checkpoint `path`, compared with `against` if given."""

    kind: str = "verify"
    path: str
    against: str | None = None
    command: str
    version: str
