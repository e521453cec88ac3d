"""Lost updates of a step: the intended change compared with the change that was stored.

Effective descent quality (Collage, arXiv 2405.03637): with D the intended and M the actual change of the weights, EDQ =
<D / |D|, M>, the length of the move along the intended direction. EDQ / |D| is 1 if nothing is lost.

The intended change is the result of fp32 arithmetic on the stored state and the gradient. The paper's released code
computes M from the high parts alone; both are given here, because hi moves only after lo has accumulated half an ulp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lpconv.optim.kernel import apply_rule
from lpconv.optim.rules import UpdateRule
from lpconv.optim.storage import Parts, Storage, load, stored_value


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One step of one parameter (or of several, combined). Norms are Euclidean; a sharded parameter counts its shard.

    `*_hi` refers to the bf16 weight that the model reads, `*_full` to everything stored. `num_meant` is the number of
    weights whose intended change is not 0, `num_lost_*` the number of those that stayed the same.
    """

    name: str
    step: int
    num_meant: int
    num_lost_hi: int
    num_lost_full: int
    intended_norm: float
    along_hi: float
    along_full: float

    @property
    def edq_hi(self) -> float:
        """EDQ / |D| of the bf16 weights; NaN if no change was intended."""
        return self.along_hi / self.intended_norm**2 if self.intended_norm else math.nan

    @property
    def edq_full(self) -> float:
        """EDQ / |D| of everything stored; NaN if no change was intended."""
        return self.along_full / self.intended_norm**2 if self.intended_norm else math.nan

    @property
    def lost_hi(self) -> float:
        """Fraction of intended updates that did not change the bf16 weight."""
        return self.num_lost_hi / self.num_meant if self.num_meant else 0.0

    @property
    def lost_full(self) -> float:
        """Fraction of intended updates that changed no stored bit and are lost for good."""
        return self.num_lost_full / self.num_meant if self.num_meant else 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    storage: Storage
    hi: Tensor
    full: Tensor
    intended: Tensor

    def compare(self, name: str, step: int, weight: tuple[Tensor, ...]) -> UpdateRecord:
        full = stored_value(self.storage, weight)
        moved_hi, moved_full = weight[0].float() - self.hi, full - self.full
        is_intended = self.intended != 0
        return UpdateRecord(
            name=name,
            step=step,
            num_meant=int(is_intended.sum()),
            num_lost_hi=int((is_intended & (moved_hi == 0)).sum()),
            num_lost_full=int((is_intended & (moved_full == 0)).sum()),
            intended_norm=float(self.intended.double().norm()),
            along_hi=float(self.intended.double() @ moved_hi.double()),
            along_full=float(self.intended.double() @ moved_full.double()),
        )


def snapshot(
    rule: UpdateRule, storages: Sequence[Storage], parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...]
) -> Snapshot:
    """Record a parameter before its step; costs about an eager step, and three fp32 copies while it exists."""
    start = load(storages[0], parts[0])
    end = apply_rule(rule, storages, parts, gradient, coefficients)[0]
    return Snapshot(
        storage=storages[0],
        hi=parts[0][0].float().clone(),
        full=stored_value(storages[0], parts[0]).clone(),
        intended=end - start,
    )


def combine(records: Sequence[UpdateRecord]) -> UpdateRecord:
    """Combine records of several parameters of one step into one, for a layer or the whole model."""
    return UpdateRecord(
        name="all",
        step=records[0].step,
        num_meant=sum(r.num_meant for r in records),
        num_lost_hi=sum(r.num_lost_hi for r in records),
        num_lost_full=sum(r.num_lost_full for r in records),
        intended_norm=math.hypot(*(r.intended_norm for r in records)),
        along_hi=math.fsum(r.along_hi for r in records),
        along_full=math.fsum(r.along_full for r in records),
    )
