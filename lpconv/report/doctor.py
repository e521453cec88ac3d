"""Documents of `doctor`: its result and the table of aliases."""

from collections.abc import Iterable

from lpconv.report.document import Cell, Document, Outcome, Row, Table, section, sections_of
from lpconv.results.doctor import EMULATED, ERROR, NATIVE, UNAVAILABLE, DeviceRecord, DoctorResult, PackageRecord

_OUTCOMES: dict[str, Outcome] = {NATIVE: "passed", EMULATED: "not run", UNAVAILABLE: "failed", ERROR: "failed"}
_SUPPORT = ("<device", "<support", "<note")


def doctor_document(result: DoctorResult) -> Document:
    """Devices, their formats and products, and packages."""
    formats = tuple((f.format, f.device, _level(f.level), f.note) for f in result.formats)
    products = tuple((p.layout, p.device, _level(p.level), p.note) for p in result.products)
    packages = tuple(map(_package_row, result.packages))
    return Document(
        kind="doctor",
        title=f"lpconv {result.lpconv} on Python {result.python}, {result.platform}",
        facts={device.label: _device(device) for device in result.devices},
        sections=sections_of(
            section("Number formats", Table(columns=("format", *_SUPPORT), rows=formats)),
            section("Scaled products", Table(columns=("layout", *_SUPPORT), rows=products)),
            section("Packages", Table(columns=("package", "<for", "<installed", "<needed"), rows=packages)),
        ),
    )


def alias_table(aliases: Iterable[tuple[str, str, str]]) -> Table:
    """Every alias and its hub id; `aliases` are (family, name, hub id)."""
    return Table(columns=("family", "<name", "<hub id"), rows=tuple(aliases))


def _level(level: str) -> Cell:
    return Cell(text=level, outcome=_OUTCOMES[level])


def _package_row(package: PackageRecord) -> Row:
    lacking: Outcome = "not run" if package.extra else "failed"  # extras are optional
    installed = Cell(text=package.installed or "missing", outcome="passed" if package.ok else lacking)
    return package.name, f"lpconv[{package.extra}]" if package.extra else "lpconv", installed, package.required


def _device(device: DeviceRecord) -> str:
    facts = [device.name, *device.features]
    if device.capability:
        facts.append("compute capability {}.{}".format(*device.capability))
    if device.problem:
        facts.append(f"cannot be used: {device.problem}")
    return ", ".join(facts)
