"""Records of `lpconv doctor`."""

from dataclasses import dataclass

from lpconv.results.documents import Result

NATIVE = "native"
EMULATED = "emulated"
UNAVAILABLE = "unavailable"
ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A compute device. `kind` is ``cpu``, ``cuda`` or ``rocm``; `index` counts GPUs.

    `features` are the CPU flags relevant to lpconv, `capability` is a GPU's CUDA compute capability as (major, minor),
    and `problem` is the reason why the device cannot be used, or None.
    """

    kind: str
    name: str
    index: int | None = None
    capability: tuple[int, ...] | None = None
    features: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def label(self) -> str:
        """torch's name of the device: ``cpu``, ``cuda:0``."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class FormatSupport:
    """How a device multiplies a format: natively, emulated in a wider format, or not at all. `note` says why."""

    format: str
    device: str
    level: str
    note: str


@dataclass(frozen=True, kw_only=True)
class ProductSupport:
    """Outcome of a scaled product on a device: native, emulated in bf16, or an error, with the reason in `note`."""

    layout: str
    device: str
    level: str
    note: str


@dataclass(frozen=True, kw_only=True)
class PackageRecord:
    """A library that lpconv or its `extra` needs: the supported versions, and the installed version or None."""

    name: str
    required: str
    extra: str | None
    installed: str | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class DoctorResult(Result):
    """Properties of this machine that decide what lpconv can do on it."""

    kind: str = "doctor"
    lpconv: str
    python: str
    platform: str
    devices: tuple[DeviceRecord, ...]
    formats: tuple[FormatSupport, ...]
    products: tuple[ProductSupport, ...]
    packages: tuple[PackageRecord, ...]
