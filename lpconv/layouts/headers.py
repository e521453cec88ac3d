"""The layout of a checkpoint, recognised by what its config and headers mean. No torch or data here.

`docs/reference/layouts.md` lists what lpconv reads, and what was tested.
"""

import re
from collections.abc import Collection, Container, Mapping
from typing import Any

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms import Stored, grid_of
from lpconv.forms.facts import Headers
from lpconv.forms.grid import Grid
from lpconv.layouts import LAYOUTS, READ
from lpconv.layouts.compressed_config import INPUT_SCALES, weight_settings
from lpconv.layouts.layout import Layout
from lpconv.layouts.lpconv import read_own

# Prefixes that wrappers add to the names of a model's tensors.
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}
# Last parts of names of activation and cache scales, which no weight needs.
ACTIVATIONS = frozenset(
    {*INPUT_SCALES, "input_zero_point", "output_scale", "output_zero_point", "activation_scale",
     "k_scale", "v_scale", "q_scale", "prob_scale"}
)  # fmt: skip
# Suffixes to the name of a weight or of its module. Some of a model's own tensors end in the first ones, too.
_ALSO_MODELS = ("_scale", "_shape", "_scales", ".scales")
_PARTS = ("_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_packed", "_g_idx", "_blocks", ".pre_quant_scale",
          ".qweight", ".qzeros", ".g_idx", *_ALSO_MODELS)  # fmt: skip
# Tensor names that only these tools use, in layouts that lpconv does not read.
_UNREAD = {
    "optimum-quanto": re.compile(r"\.weight\._(data|scale|shift|zeropoint)\b"),
    "bitsandbytes": re.compile(r"\.weight\.(absmax|quant_map|quant_state\.bitsandbytes__\w+)$|\.(SCB|weight_format)$"),
    "torchao": re.compile(r"\._?weight(:|_)_?(qdata|tensor_impl|data|int_data|scale_and_zero)\b"),
    "HQQ": re.compile(r"\.W_q$"),
}


def recognise(headers: Headers) -> Mapping[str, Stored]:
    """The form of every tensor of a checkpoint, by name. Components of other tensors are not listed.

    Neither are the activation scales of third-party checkpoints.
    """
    layout = READ.get(headers.quantised_by or "")
    read = [(n, None if layout is None else layout.read(n, headers)) for n in headers.root]
    forms = {n: form if form is not None and form.agrees else read_own(n, headers) for n, form in read}
    parts = {c.name for n, form in forms.items() for c in form.components if c.name != n}
    if layout is not None:
        parts |= {n for n in forms if n.rpartition(".")[2] in ACTIVATIONS}
    return {form.name: form for n, form in forms.items() if n not in parts}


def judged_grids(forms: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Grid]:
    """The grids by name whose scales are judged; `settings` is the `quantization_config`."""
    layout = READ.get(str(settings.get("quant_method")))
    if layout is None or not layout.is_judged:
        return {}
    return {n: grid for n, form in forms.items() if (grid := grid_of(form)) is not None}


def is_part(name: str, dtype: str, weights: Container[str]) -> bool:
    """Whether a tensor outside of all layouts can only be a part of a quantised weight."""
    for part in _PARTS:
        base = name.removesuffix(part)
        if base != name and (part not in _ALSO_MODELS or base in weights or base.endswith(".weight")):
            return True
    return dtype.startswith(("F8_", "F6_", "F4")) or (name.endswith(".weight") and dtype in ("U8", "I8"))


def why_unreadable(headers: Headers) -> str | None:
    """Why lpconv cannot read the layout, from tensor names and the config; None if it can or need not."""
    method = headers.quantised_by
    if method in READ:
        return READ[method].why_unreadable(headers.quantization) or _single_bits(headers.quantization, READ[method])
    tool = None if method in (None, "lpconv") else f"`{method}`"
    for name, pattern in _UNREAD.items():
        match = next((n for n in headers.root if pattern.search(n)), None)
        tool = tool if match is None else f"{name} (`{match}`)"
    for layout in LAYOUTS.values():
        match = layout.unread_part(headers)
        tool = tool if match is None else f"{layout.name} (`{match}`)"
    return None if tool is None else f"the checkpoint is quantised by {tool}, which lpconv does not read"


def _single_bits(config: Mapping[str, Any], layout: Layout) -> str | None:
    """Why integers of one bit are unreadable, from the settings of weights in a config; None if there are none."""
    for settings in weight_settings(config):
        bits = settings.get("num_bits", settings.get("bits", settings.get("w_bit")))
        if bits == 1 and settings.get("type", "int") == "int":
            return f"the weights are 1-bit integers, which lpconv does not read in layout `{layout.name}`"
    return None


def check_unwrapped(names: Collection[str]) -> None:
    """Raise InputError for tensors of a model that was saved inside a wrapper."""
    for prefix, wrapper in _WRAPPERS.items():
        found = [n for n in names if f".{prefix}" in f".{n}"]
        if found and (prefix == "_orig_mod." or all(n.startswith(prefix) for n in names)):  # models may have a `module`
            what = f"tensor `{found[0]}` has the prefix `{prefix}`, which {wrapper} adds to names"
            raise InputError(what, hint=f"save the model inside it: `model.{prefix}save_pretrained(DIR)`")


def check_readable(headers: Headers) -> None:
    """Raise UnsupportedError for a layout that lpconv does not read, InputError for names with a wrapper's prefix."""
    check_unwrapped(headers.root)
    why = why_unreadable(headers)
    if why is not None:
        hint = "lpconv reads " + ", ".join(sorted(READ)) + "; otherwise start from the unquantised checkpoint"
        raise UnsupportedError(why, hint=hint)
