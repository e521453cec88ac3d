"""What `lpconv doctor` found."""

from dataclasses import dataclass

from lpconv.results.documents import SCHEMA_VERSION

__all__ = [
    "EMULATED",
    "ERROR",
    "NATIVE",
    "UNAVAILABLE",
    "CacheRecord",
    "DeviceRecord",
    "DoctorResult",
    "ExtraRecord",
    "FormatSupport",
    "MachineRecord",
    "PackageRecord",
    "ProductSupport",
]

NATIVE = "native"
EMULATED = "emulated"
UNAVAILABLE = "unavailable"
ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One device that computes. `kind` is ``cpu``, ``cuda`` or ``rocm``; `index` counts GPUs.

    `features` are the CPU flags that matter to us, `capability` a GPU's CUDA compute capability as (major, minor), and
    `problem` says why the device cannot be used, None if it can. `num_cores` are logical cores, or multiprocessors.
    """

    kind: str
    name: str
    index: int | None = None
    capability: tuple[int, ...] | None = None
    features: tuple[str, ...] = ()
    num_cores: int
    memory_bytes: int
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
    """A library that lpconv needs: the oldest version it works with, and the installed one or None."""

    name: str
    required: str
    installed: str | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class ExtraRecord:
    """An optional part: what it is for, which of its packages are missing, and the command that installs them."""

    name: str
    purpose: str
    missing: tuple[str, ...]
    install: str


@dataclass(frozen=True, kw_only=True)
class MachineRecord:
    """Memory and disk. `memory_limit_bytes` is the container's limit, None where there is none.

    `disk_path` is the folder that was asked about, the one where outputs would go.
    """

    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    disk_path: str
    disk_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheRecord:
    """The Hugging Face cache: where it is, how many models lie in it, and whether downloads are switched off."""

    directory: str
    exists: bool
    num_models: int
    offline: bool


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """Everything about this machine that decides what lpconv can do here. `problems` are sentences for the user."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "doctor"
    lpconv: str
    python: str
    platform: str
    devices: tuple[DeviceRecord, ...]
    formats: tuple[FormatSupport, ...]
    packages: tuple[PackageRecord, ...]
    extras: tuple[ExtraRecord, ...]
    machine: MachineRecord
    cache: CacheRecord
    products: tuple[ProductSupport, ...] = ()
    problems: tuple[str, ...] = ()
