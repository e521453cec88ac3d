"""The forms in which tensors are stored; `lpconv.forms.form` explains them.

`FORMS` are those of lpconv's own layout. `lpconv.layouts` has the files of other tools, most of them with `Tiles`.
"""

from lpconv.forms.coded import CodedForm
from lpconv.forms.entropy import EntropyCoded
from lpconv.forms.facts import Component, FormSettings, Headers
from lpconv.forms.form import Form, Kept, Stored
from lpconv.forms.grid import Grid
from lpconv.forms.pair import Pair
from lpconv.forms.points import PointRows
from lpconv.forms.scaled import ScaledCodes
from lpconv.forms.tiles import Tiles

__all__ = ["FORMS", "Component", "Form", "FormSettings", "Headers", "Kept", "Stored", "grid_of"]


def grid_of(form: Stored) -> Grid | None:
    """The codes and scales of a weight as a `Grid`; None for any other form."""
    return form.grid if isinstance(form, CodedForm) else form if isinstance(form, Grid) else None


# In the order in which they are tried on a file; a tensor that no other form recognises is `Kept`.
FORMS: dict[str, type[Form]] = {f.kind: f for f in (EntropyCoded, PointRows, Tiles, ScaledCodes, Pair, Kept)}
