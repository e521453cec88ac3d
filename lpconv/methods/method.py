"""What a conversion method is: a record. Plain Python, so that planning needs no torch."""

from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.formats.spec import Format, get_format

__all__ = ["Method"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to write a weight as a short sum of scaled components, value = Σ_i scale_i · component_i.

    `encoder` names the component form: ``scaled`` (one component of `formats` and one scale per tensor), ``pair`` (a
    high component in the root checkpoint and a residual beside it) or ``points`` (for each row components of `formats`,
    each with a scale; what stays in 16 bits is ``scaled``). `scale_rounding` is how a scale becomes a power of
    two: ``nearest`` or ``floor``. `residuals` are the residual forms of a pair, the first one its default.
    """

    name: str
    title: str
    summary: str
    encoder: str
    formats: tuple[str, ...]
    default_format: str
    scale_rounding: str = "nearest"
    residuals: tuple[str, ...] = ()

    def format(self, name: str | None) -> Format:
        """The format called `name` (the method's default for None); UsageError where the method has no such format."""
        fmt = get_format(name or self.default_format)
        if fmt.name not in self.formats:
            raise UsageError(
                f"method `{self.name}` does not write format `{fmt.name}`",
                hint="it writes " + ", ".join(self.formats),
            )
        return fmt
