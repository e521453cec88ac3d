"""Records that add up field by field."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Self


class Summed:
    """A frozen record with ``+``. Fields are added, unless `joined` names another function of the two values."""

    def __add__(self, other: Self) -> Self:
        joins = {f.name: f.metadata.get("join", operator.add) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # subclasses are records
        return type(self)(**{name: join(getattr(self, name), getattr(other, name)) for name, join in joins.items()})


def joined(join: Callable[[Any, Any], Any], default: Any) -> Any:
    """A field of a `Summed` record that `join` combines, such as `max`."""
    return dataclasses.field(default=default, metadata={"join": join})
