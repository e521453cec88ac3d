"""The forms in which tensors are stored: one file per form, listed in `FORMS`; `lpconv.forms.form` explains them.

Third-party layouts are read by `lpconv.forms.foreign`.
"""

from collections.abc import Mapping
from typing import Any

from lpconv.forms.compressed import Compressed, CompressedTiles
from lpconv.forms.facts import Component, FormSettings, Headers
from lpconv.forms.fine_grained import FineGrained
from lpconv.forms.foreign import ACTIVATIONS, MLX, READ, find
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.form import Form, Kept, Stored
from lpconv.forms.gguf_blocks import GgufBlocks, GgufNumbers
from lpconv.forms.mlx import Mlx
from lpconv.forms.pair import Pair
from lpconv.forms.points import PointRows
from lpconv.forms.scaled import ScaledCodes
from lpconv.forms.tiles import Tiles

__all__ = ["FORMS", "Component", "Form", "FormSettings", "Headers", "Kept", "Stored", "grid_of", "judged_grids",
           "recognise"]  # fmt: skip

# In the order in which `recognise` tries them; a tensor that no other form recognises is `Kept`.
FORMS: dict[str, type[Form]] = {
    f.kind: f
    for f in (
        PointRows,
        Tiles,
        ScaledCodes,
        Compressed,
        CompressedTiles,
        FineGrained,
        Mlx,
        GgufBlocks,
        GgufNumbers,
        Pair,
        Kept,
    )
}


def recognise(headers: Headers) -> Mapping[str, Stored]:
    """The form of every tensor of a checkpoint, by name. Components of other tensors are not listed.

    Neither are the activation scales of third-party checkpoints.
    """
    forms = {n: _recognise_one(n, headers) for n in headers.root}
    parts = {c.name for n, form in forms.items() for c in form.components if c.name != n}
    if headers.quantised_by in READ:
        parts |= {n for n in forms if n.rpartition(".")[2] in ACTIVATIONS}
    return {form.name: form for n, form in forms.items() if n not in parts}


def grid_of(form: Stored) -> Grid | None:
    """The codes and scales of a weight as a `Grid`; None for any other form."""
    if isinstance(form, (Compressed, Tiles)):
        return form.grid
    return form if isinstance(form, Grid) else None


def judged_grids(forms: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Grid]:
    """The grids by name whose scales are judged: of layouts that third-party tools write too.

    `settings` is the `quantization_config`.
    """
    if settings.get("quant_method") not in READ - {MLX}:
        return {}
    return {n: grid for n, form in forms.items() if (grid := grid_of(form)) is not None}


def _recognise_one(name: str, headers: Headers) -> Stored:
    form = next(f for kind in FORMS.values() if (f := kind.recognise(name, headers)))
    return find(name, headers) or form if isinstance(form, Kept) else form
