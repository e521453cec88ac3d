"""What a verification found, of a conversion or by `lpconv verify`, and the gates that results are held against."""

from dataclasses import dataclass

from lpconv.results.documents import Result


@dataclass(frozen=True, kw_only=True)
class HashCheck:
    """Comparison of files with SHA256SUMS."""

    num_files: int
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FilesCheck:
    """Comparison of config, tokenizer and other small files with those of another checkpoint.

    `different` says in words which values differ; `not_compared` names what nobody judged.
    """

    compared: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightsCheck:
    """Stored weights compared with the source's. `min_sqnr_db` belongs to tensor `worst`; infinite means exact.

    `num_elements_checked` of `num_elements` were converted again, and decoded from the file and compared with the
    reference cast. `miss_probability` is the chance that one bad block somewhere in the weights was not among them.
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
class LogitsCheck:
    """Comparison of the outputs of source and result on the same inputs. All fields are None if it was `skipped`.

    `max_abs_diff` and `rel_error` (‖y - ŷ‖/‖y‖) are over all outputs that are finite of the source, and are infinite or
    NaN where the result's are; `top1_agreement` is the share of positions whose largest output has the same index;
    `mean_kl` is KL(source ‖ result) in nats per position. On a text `reverse_kl` is KL(result ‖ source), and the
    perplexities are of the next token, None where a model predicts another one.
    """

    max_abs_diff: float | None = None
    rel_error: float | None = None
    bit_equal: bool | None = None
    top1_agreement: float | None = None
    mean_kl: float | None = None
    reverse_kl: float | None = None
    perplexity: float | None = None
    source_perplexity: float | None = None
    model_class: str | None = None
    inputs: str | None = None
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """One ``--gate``: its expression, the measured value, and whether it passed."""

    expression: str
    value: float | None
    passed: bool


@dataclass(frozen=True, kw_only=True)
class ComparedTensor:
    """One weight compared with a reference in any form. `num_off` of `num_groups` groups differ by a constant factor.

    Where a conversion was made again, no groups are asked: what is stored is right, or `problem`.
    """

    name: str
    stored_as: str
    reference: str
    sqnr_db: float
    max_rel_error: float
    num_groups: int = 0
    num_off: int = 0
    problem: str | None = None


_SHOWN = 3  # problems in the sentence of an error


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The outcome of verification. `level` is the deepest level that ran; `problems` says in words what failed.

    `tensors` are those that were compared, the worst first: at the level ``values``, which compares any two
    checkpoints, those of both.
    """

    level: str
    passed: bool
    hash: HashCheck | None = None
    files: FilesCheck | None = None
    weights: WeightsCheck | None = None
    logits: LogitsCheck | None = None
    gates: tuple[GateRecord, ...] = ()
    problems: tuple[str, ...] = ()
    tensors: tuple[ComparedTensor, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """The problems, and the gates that failed with the values they met."""
        missed = [g for g in self.gates if not g.passed]
        values = ("nothing" if g.value is None else f"{g.value:.6g}" for g in missed)
        gates = (f"gate `{g.expression}` met {value}" for g, value in zip(missed, values, strict=True))
        return (*self.problems, *gates)

    @property
    def failure(self) -> str:
        """The first of `failures`, and how many there are besides: a sentence for an error."""
        shown, rest = self.failures[:_SHOWN], len(self.failures) - _SHOWN
        return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, kw_only=True)
class Verification(Result, VerifyResult):
    """Result of `lpconv verify` on the output or checkpoint `path`, compared with `against` if given."""

    kind: str = "verify"
    path: str
    against: str | None = None
    command: str
    version: str
