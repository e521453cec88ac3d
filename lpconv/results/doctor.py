"""What `lpconv doctor` found."""

from dataclasses import dataclass

from lpconv.results.documents import SCHEMA_VERSION

NATIVE = "native"
EMULATED = "emulated"
UNAVAILABLE = "unavailable"
ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One device that computes. `kind` is ``cpu``, ``cuda`` or ``rocm``; `index` counts GPUs.

    `features` are the CPU flags that matter to us, `capability` a GPU's CUDA compute capability as (major, minor), and
    `problem` says why the device cannot be used, None if it can.
    """

    kind: str
    name: str
    index: int | None = None
    capability: tuple[int, ...] | None = None
    features: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def label(self) -> str:
        """The device as torch calls it: ``cpu``, ``cuda:0``."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class FormatSupport:
    """How a device multiplies matrices of a format: itself, emulated in a wider one, or not at all; `note` says why."""

    format: str
    device: str
    level: str
    note: str


@dataclass(frozen=True, kw_only=True)
class ProductSupport:
    """What a device made of a scaled product when it was tried: native, emulated in bf16, an error; `note` says why."""

    layout: str
    device: str
    level: str
    note: str


@dataclass(frozen=True, kw_only=True)
class PackageRecord:
    """A library that lpconv or its `extra` needs: the versions it works with, and the installed one or None."""

    name: str
    required: str
    extra: str | None
    installed: str | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """What decides what lpconv can do on this machine."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "doctor"
    lpconv: str
    python: str
    platform: str
    devices: tuple[DeviceRecord, ...]
    formats: tuple[FormatSupport, ...]
    products: tuple[ProductSupport, ...]
    packages: tuple[PackageRecord, ...]
