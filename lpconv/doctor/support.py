"""Which number formats a device multiplies itself, and what stands in where it does not.

Every format can be stored and used on every working device: what is not native is decoded, exactly, to a wider format
that is. GPU limits are NVIDIA's compute capabilities: tensor cores for fp16 from 7.0 (Volta), int8 from 7.5 (Turing),
bf16 and tf32 from 8.0 (Ampere), fp8 from 8.9 (Ada) and 9.0 (Hopper), fp4 with e8m0 block scales from 10.0 (Blackwell).
"""

from lpconv.formats.spec import FORMATS, Format
from lpconv.results.doctor import EMULATED, NATIVE, UNAVAILABLE, DeviceRecord, FormatSupport

__all__ = ["CPU_FEATURES", "GROUPS", "format_support", "needs"]

# Several formats that people name as one.
GROUPS: dict[str, tuple[str, ...]] = {"fp8": ("e4m3fn", "e5m2"), "fp6": ("e3m2", "e2m3"), "fp4": ("e2m1",)}

# The CPU flags of Linux (x86, then Arm) that let matrix products run in a 16-bit format.
_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}
CPU_FEATURES = frozenset(flag for flags in _CPU_FLAGS.values() for flag in flags) | {"avx2", "avx512f", "amx_int8"}

_CAPABILITIES = {
    "fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "e4m3fn": (8, 9), "e5m2": (8, 9),
    "e2m1": (10, 0), "e8m0fnu": (10, 0), "int8": (7, 5),
}  # fmt: skip


def format_support(device: DeviceRecord) -> tuple[FormatSupport, ...]:
    """How `device` handles each known format."""
    return tuple(_support(fmt, device) for fmt in FORMATS.values())


def needs(format_name: str) -> str:
    """In words, what hardware multiplies a format natively."""
    where = []
    if format_name in _CPU_FLAGS:
        where.append("a CPU with " + "/".join(_CPU_FLAGS[format_name]))
    if format_name in _CAPABILITIES:
        where.append("a GPU of compute capability {}.{}".format(*_CAPABILITIES[format_name]))
    return " or ".join(where) or "hardware that lpconv does not know"


def _support(fmt: Format, device: DeviceRecord) -> FormatSupport:
    if device.problem:
        return FormatSupport(format=fmt.name, device=device.label, level=UNAVAILABLE, note=device.problem)
    if _is_native(fmt.name, device):
        return FormatSupport(format=fmt.name, device=device.label, level=NATIVE, note="")
    wider = "bf16" if _fits_bf16(fmt) and _is_native("bf16", device) else "fp32"
    note = f"decoded exactly to {wider}; native needs {needs(fmt.name)}"
    return FormatSupport(format=fmt.name, device=device.label, level=EMULATED, note=note)


def _is_native(name: str, device: DeviceRecord) -> bool:
    if name == "fp32":
        return True
    if device.kind == "cpu":
        return not set(device.features).isdisjoint(_CPU_FLAGS.get(name, ()))
    return device.capability is not None and name in _CAPABILITIES and device.capability >= _CAPABILITIES[name]


def _fits_bf16(fmt: Format) -> bool:
    bf16 = FORMATS["bf16"]
    in_range = fmt.max <= bf16.max and fmt.min_subnormal >= bf16.min_subnormal
    return fmt.name != "bf16" and fmt.mantissa_bits <= bf16.mantissa_bits and in_range
