"""``lpconv doctor --require``: fail, with what to do, where the machine lacks something a job needs."""

from collections.abc import Iterable
from dataclasses import dataclass

from lpconv.doctor.examine import examine
from lpconv.doctor.packages import EXTRAS
from lpconv.doctor.support import GROUPS, needs
from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.lookup import find
from lpconv.results.doctor import NATIVE, DoctorResult

__all__ = ["REQUIREMENTS", "Missing", "missing", "require"]

# What can be required, and the formats that each stands for; none for a GPU and for the extras.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FORMATS},
    **GROUPS,
    **dict.fromkeys(EXTRAS, ()),
    "gpu": (),
}


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Something required that is not here: its name, what is wrong, and what to do about it."""

    name: str
    why: str
    fix: str


def require(names: Iterable[str], result: DoctorResult | None = None) -> None:
    """Raise UnsupportedError unless everything named is here. `result` is the machine, looked at now if None.

    A format (or `fp8`, `fp6`, `fp4`) is here if some device multiplies it natively, `gpu` if torch can use a GPU, and
    an extra if all its packages are installed. Unknown names are UsageErrors.
    """
    lacking = missing(names, result or examine())
    if not lacking:
        return
    raise UnsupportedError(
        "not available here: " + "; ".join(f"{m.name} ({m.why})" for m in lacking),
        hint="; ".join(f"{m.name}: {m.fix}" for m in lacking),
        details={"missing": [{"name": m.name, "why": m.why, "fix": m.fix} for m in lacking]},
    )


def missing(names: Iterable[str], result: DoctorResult) -> tuple[Missing, ...]:
    """Those of `names` that `result` says are not here, in their order. Unknown names raise UsageError."""
    wanted = {name: find("requirement", name, REQUIREMENTS) for name in names}
    found = (_missing(name, formats, result) for name, formats in wanted.items())
    return tuple(m for m in found if m is not None)


def _missing(name: str, formats: tuple[str, ...], result: DoctorResult) -> Missing | None:
    if formats:
        return _missing_format(name, formats, result)
    return _missing_gpu(result) if name == "gpu" else _missing_extra(name, result)


def _missing_format(name: str, formats: tuple[str, ...], result: DoctorResult) -> Missing | None:
    native = {s.format for s in result.formats if s.level == NATIVE}
    lacking = [f for f in formats if f not in native]
    if not lacking:
        return None
    levels = ", ".join(f"{s.level} on {s.device}" for s in result.formats if s.format == lacking[0])
    return Missing(name=name, why=levels, fix=f"use {needs(lacking[0])}")


def _missing_gpu(result: DoctorResult) -> Missing | None:
    gpus = [d for d in result.devices if d.kind != "cpu"]
    if any(d.problem is None for d in gpus):
        return None
    why = "; ".join(f"{d.name}: {d.problem}" for d in gpus) or "torch finds no GPU"
    return Missing(name="gpu", why=why, fix="use a machine with an NVIDIA GPU and a torch built for it")


def _missing_extra(name: str, result: DoctorResult) -> Missing | None:
    extra = next(e for e in result.extras if e.name == name)
    if not extra.missing:
        return None
    return Missing(name=name, why=", ".join(extra.missing) + " not installed", fix=extra.install)
