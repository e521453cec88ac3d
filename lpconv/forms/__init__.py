"""What a stored tensor is: one file per form, listed in `FORMS`. How they work is told in `lpconv.forms.form`."""

from collections.abc import Mapping

from lpconv.forms.compressed import Compressed
from lpconv.forms.facts import Component, Headers, Settings
from lpconv.forms.form import Form
from lpconv.forms.kept import Kept
from lpconv.forms.pair import Pair
from lpconv.forms.points import PointRows
from lpconv.forms.rows import Rows
from lpconv.forms.scaled import Scaled

__all__ = ["FORMS", "Component", "Form", "Headers", "Kept", "Settings", "recognise"]

# In the order in which they are asked whether a stored tensor is theirs; what is nobody's keeps its bits.
FORMS: dict[str, type[Form]] = {f.kind: f for f in (PointRows, Rows, Scaled, Compressed, Pair, Kept)}


def recognise(headers: Headers) -> Mapping[str, Form]:
    """The form of every tensor of a checkpoint by its name; what belongs to another tensor is not listed."""
    found = {n: next(f for kind in FORMS.values() if (f := kind.recognise(n, headers))) for n in headers.root}
    parts = {c.name for form in found.values() for c in form.side}
    return {n: form for n, form in found.items() if n not in parts}
