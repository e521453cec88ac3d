"""The share of each worker in a conversion, and its folder, from the plan alone.

A plan is a pure function of headers and options, so every worker makes the same plan and takes its share of the weight
files. Part i of n is published as `OUT.parts/i-of-n`, by a rename like any output.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from lpconv.errors import UnsupportedError, UsageError
from lpconv.plan.options import ConvertOptions
from lpconv.plan.plan import Plan, PlannedShard
from lpconv.storage.staging import PARTS, folder_next_to
from lpconv.storage.urls import is_url

_FOLDER = re.compile(r"([1-9]\d*)-of-([1-9]\d*)")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse ``i/n``. Raises UsageError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(
                f"`{text}` is not a valid part of a conversion", hint="write i/n with i from 1 to n, such as 2/5"
            )
        return cls(number=int(match[1]), count=int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, output: Path) -> Path:
        """The folder in which this part of `output` is published."""
        return folder_next_to(output, PARTS) / f"{self.number}-of-{self.count}"


def check_shareable(options: ConvertOptions) -> None:
    """Raise UsageError for options with work that each worker would have to repeat, with possibly different results."""
    if options.calibrate is not None:
        raise UsageError(
            "a conversion with --calibrate cannot be split: each worker would run the whole model",
            hint="convert with one process, which streams the weights and needs memory only for activations",
        )


def part_folders(output: Path) -> dict[Part, Path]:
    """The folders of an output's finished parts, in order."""
    folder = folder_next_to(output, PARTS)
    matches = {p: _FOLDER.fullmatch(p.name) for p in (folder.iterdir() if folder.is_dir() else ())}
    parts = {Part(number=int(m[1]), count=int(m[2])): p for p, m in matches.items() if m is not None}
    return dict(sorted(parts.items(), key=lambda it: (it[0].count, it[0].number)))


def folder_for_parts(output: Path | str) -> Path:
    """The output folder of a shared conversion. Raises UnsupportedError for a URL."""
    if is_url(str(output)):
        raise UnsupportedError(
            f"parts can only be written to a local folder, not to `{output}`",
            hint="pass a folder, and copy the finished output to its place",
        )
    return Path(output)


def share_of(plan: Plan, part: Part) -> tuple[PlannedShard, ...]:
    """The files of a part: the largest file first, each to the part with the fewest bytes to read so far."""
    loads = [0] * part.count
    mine: set[str] = set()
    for shard in sorted(plan.shards, key=lambda s: (-s.bytes_read, s.root.name)):
        least = loads.index(min(loads))
        loads[least] += shard.bytes_read
        if least == part.number - 1:
            mine.add(shard.root.name)
    return tuple(s for s in plan.shards if s.root.name in mine)
