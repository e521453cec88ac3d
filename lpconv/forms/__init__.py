"""The forms in which tensors are stored; `lpconv.forms.form` explains them.

`FORMS` are those of lpconv's own layout. `lpconv.layouts` has the files of other tools, most of them with `Tiles`.
"""

from lpconv.forms.facts import Component, FormSettings, Headers
from lpconv.forms.form import Form, Kept, Stored
from lpconv.forms.pair import Pair
from lpconv.forms.points import PointRows
from lpconv.forms.scaled import ScaledCodes
from lpconv.forms.tiles import Tiles

__all__ = ["FORMS", "Component", "Form", "FormSettings", "Headers", "Kept", "Stored"]

# In the order in which they are tried on a file; a tensor that no other form recognises is `Kept`.
FORMS: dict[str, type[Form]] = {f.kind: f for f in (PointRows, Tiles, ScaledCodes, Pair, Kept)}
