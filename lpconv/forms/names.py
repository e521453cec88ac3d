"""Names of the stored parts of a weight. Plain Python, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlaneNames:
    """How a layout names the stored parts of a weight, and the dtypes that it chooses.

    Names are suffixes to the weight's name, or with `of_module` to that of its module; "" for parts that it lacks:
    `packed` codes, a `scale` per tile, a `factor` that divides the scales, the `size` of integers and the `bias`, the
    value of their code 0. `axis` are leading axes of the codes, `word` the dtype in which all codes are stored,
    `integer_scale` the dtype of the scales of integers, and `scale_dtypes` those that scales in a checkpoint may have.
    """

    axis: tuple[int, ...] = ()
    packed: str = ""
    word: str = ""
    scale: str = "_scale"
    integer_scale: str = "F32"
    scale_dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    factor: str = ""
    size: str = ""
    bias: str = ""
    of_module: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all parts."""
        return tuple(filter(None, (self.packed, self.scale, self.factor, self.size, self.bias)))

    def part(self, weight: str, suffix: str) -> str:
        """The name of a part of a weight."""
        return (weight.removesuffix(".weight") if self.of_module else weight) + suffix
