"""A doctor's result and the alias table, as rich renderables for the terminal."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lpconv.results.doctor import EMULATED, ERROR, NATIVE, UNAVAILABLE, DeviceRecord, DoctorResult

__all__ = ["render_aliases", "render_doctor"]

_STYLES = {NATIVE: "green", EMULATED: "yellow", UNAVAILABLE: "red", ERROR: "red"}


def render_doctor(result: DoctorResult) -> RenderableType:
    """The whole result: machine, devices, formats and products per device, packages, extras, and problems last."""
    tables = (_machine, _formats, _products, _packages, _extras)
    parts: list[RenderableType] = [table(result) for table in tables]
    parts += [Text(f"problem: {problem}", style="red") for problem in result.problems]
    return Group(*parts)


def render_aliases(aliases: Iterable[tuple[str, str, str]]) -> RenderableType:
    """Every short name and the hub id it means; `aliases` are (family, name, hub id)."""
    table = Table("family", "name", "hub id", box=None, pad_edge=False)
    for alias in aliases:
        table.add_row(*alias)
    return table


def _machine(result: DoctorResult) -> RenderableType:
    machine, cache = result.machine, result.cache
    table = Table.grid(padding=(0, 2))
    table.add_row("lpconv", f"{result.lpconv} on Python {result.python}, {result.platform}")
    for device in result.devices:
        table.add_row(device.label, _device(device))
    limit = f", limited to {_gib(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
    table.add_row("memory", f"{_gib(machine.memory_available_bytes)} free of {_gib(machine.memory_bytes)}{limit}")
    table.add_row("disk", f"{_gib(machine.disk_free_bytes)} free of {_gib(machine.disk_bytes)} at {machine.disk_path}")
    state = f"{cache.num_models} models" if cache.exists else "not there yet"
    table.add_row("cache", f"{cache.directory}, {state}, {'offline' if cache.offline else 'downloads allowed'}")
    return table


def _device(device: DeviceRecord) -> str:
    facts = [device.name, f"{device.num_cores} {'cores' if device.kind == 'cpu' else 'multiprocessors'}"]
    if device.kind != "cpu":
        facts.append(_gib(device.memory_bytes))
    if device.capability:
        facts.append("compute capability {}.{}".format(*device.capability))
    if device.features:
        facts.append(" ".join(device.features))
    if device.problem:
        facts.append(f"cannot be used: {device.problem}")
    return ", ".join(facts)


def _formats(result: DoctorResult) -> RenderableType:
    table = Table("format", "device", "support", "note", title="Number formats", title_justify="left", box=None)
    for support in result.formats:
        level = Text(support.level, style=_STYLES[support.level])
        table.add_row(support.format, support.device, level, support.note)
    return table


def _products(result: DoctorResult) -> Table:
    table = Table("layout", "device", "tried", "note", title="Scaled products", title_justify="left", box=None)
    for product in result.products:
        table.add_row(product.layout, product.device, Text(product.level, style=_STYLES[product.level]), product.note)
    return table


def _packages(result: DoctorResult) -> RenderableType:
    table = Table("package", "installed", "needed", title="Packages", title_justify="left", box=None)
    for package in result.packages:
        installed = Text(package.installed or "missing", style="green" if package.ok else "red")
        table.add_row(package.name, installed, f">= {package.required}")
    return table


def _extras(result: DoctorResult) -> RenderableType:
    table = Table("extra", "for", "state", title="Extras", title_justify="left", box=None)
    for extra in result.extras:
        state = f"missing {', '.join(extra.missing)}: {extra.install}" if extra.missing else "installed"
        table.add_row(extra.name, extra.purpose, Text(state, style="yellow" if extra.missing else "green"))
    return table


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
