"""A doctor's result and the alias table, as rich renderables for the terminal."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lpconv.results.doctor import EMULATED, ERROR, NATIVE, UNAVAILABLE, DeviceRecord, DoctorResult

_STYLES = {NATIVE: "green", EMULATED: "yellow", UNAVAILABLE: "red", ERROR: "red"}


def render_doctor(result: DoctorResult) -> RenderableType:
    """Devices, formats and products of each, and packages."""
    devices = Table.grid(padding=(0, 2))
    devices.add_row("lpconv", f"{result.lpconv} on Python {result.python}, {result.platform}")
    for device in result.devices:
        devices.add_row(device.label, _device(device))
    formats = _table("Number formats", "format", "device", "support", "note")
    for f in result.formats:
        formats.add_row(f.format, f.device, Text(f.level, style=_STYLES[f.level]), f.note)
    products = _table("Scaled products", "layout", "device", "support", "note")
    for p in result.products:
        products.add_row(p.layout, p.device, Text(p.level, style=_STYLES[p.level]), p.note)
    packages = _table("Packages", "package", "for", "installed", "needed")
    for k in result.packages:
        lacks = "yellow" if k.extra else "red"  # nobody needs all extras
        what = f"lpconv[{k.extra}]" if k.extra else "lpconv"
        packages.add_row(
            k.name, Text(what), Text(k.installed or "missing", style="green" if k.ok else lacks), k.required
        )
    return Group(devices, formats, products, packages)


def render_aliases(aliases: Iterable[tuple[str, str, str]]) -> RenderableType:
    """Every short name and the hub id it means; `aliases` are (family, name, hub id)."""
    table = Table("family", "name", "hub id", box=None, pad_edge=False)
    for alias in aliases:
        table.add_row(*alias)
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def _device(device: DeviceRecord) -> str:
    facts = [device.name, *device.features]
    if device.capability:
        facts.append("compute capability {}.{}".format(*device.capability))
    if device.problem:
        facts.append(f"cannot be used: {device.problem}")
    return ", ".join(facts)
