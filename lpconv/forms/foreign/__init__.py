"""Third-party layouts of low-precision weights, for reading, with the arithmetic in `grid.py`.

A layout is a function in `layouts.py` that makes a `Grid` from the headers of one weight, and a line in `_FINDERS` for
each `quant_method` of its configs. `docs/reference/layouts.md` lists what lpconv reads, and what was tested.
"""

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms.facts import Headers
from lpconv.forms.foreign import layouts
from lpconv.forms.foreign.gguf import Blocks, find_gguf
from lpconv.forms.foreign.grid import Grid
from lpconv.gguf import GGUF
from lpconv.storage.compressed import COMPRESSED_TENSORS, INPUT_SCALES

__all__ = ["ACTIVATIONS", "MLX", "READ", "check_readable", "check_unwrapped", "find", "is_part", "why_unreadable"]

_FINDERS: Mapping[str, Callable[[str, Headers], Grid | Blocks | None]] = {
    COMPRESSED_TENSORS: layouts.find_compressed_tensors,
    "fp8": layouts.find_fp8,
    "mxfp8": layouts.find_fp8,
    "mxfp4": layouts.find_mxfp4,
    "modelopt": layouts.find_modelopt,
    "gptq": layouts.find_gptq,
    "awq": layouts.find_awq,
    GGUF: find_gguf,
}

MLX = "mlx"  # the `quant_method` of files in mlx-lm's layout that lpconv wrote
# The values of `quant_method` that lpconv reads.
READ = frozenset((*_FINDERS, MLX))
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
    "mlx": re.compile(r"\.scales$"),
}


def find(name: str, headers: Headers) -> Grid | Blocks | None:
    """The weight whose codes are stored as `name`, or None if it is not in the layout that the config names."""
    find_in_layout = _FINDERS.get(headers.quantised_by or "")
    weight = None if find_in_layout is None else find_in_layout(name, headers)
    return weight if weight is not None and weight.agrees else None


def is_part(name: str, dtype: str, weights: Container[str]) -> bool:
    """Whether a tensor outside of all layouts can only be a part of a quantised weight."""
    for part in _PARTS:
        base = name.removesuffix(part)
        if base != name and (part not in _ALSO_MODELS or base in weights or base.endswith(".weight")):
            return True
    return dtype.startswith(("F8_", "F6_", "F4")) or (name.endswith(".weight") and dtype in ("U8", "I8"))


def _integer_bits(method: str | None, settings: object) -> Iterator[int]:
    """Yield the integer widths in a config."""
    groups = layouts.weight_settings(settings) if method == COMPRESSED_TENSORS else [settings]
    for group in groups if method in (COMPRESSED_TENSORS, "gptq", "awq") else ():
        bits = group.get("num_bits", group.get("bits", group.get("w_bit"))) if isinstance(group, dict) else None
        if isinstance(bits, int) and isinstance(group, dict) and group.get("type", "int") == "int":
            yield bits


def why_unreadable(headers: Headers) -> str | None:
    """Why lpconv cannot read the layout, from tensor names and the config; None if it can or need not."""
    method, tool = headers.quantised_by, None
    if method not in READ:
        tool = None if method in (None, "lpconv") else f"`{method}`"
        for name, pattern in _UNREAD.items():
            match = next((n for n in headers.root if pattern.search(n)), None)
            if match is not None and (name != "mlx" or _has_words(match, headers)):
                tool = f"{name} (`{match}`)"
    elif headers.quantization.get("quant_algo") == layouts.MODELOPT_SVD:
        tool = f"ModelOpt's {layouts.MODELOPT_SVD} (a part of each weight is the product of two thin matrices)"
    odd = {*_integer_bits(method, headers.quantization)} & {1, 3, 5, 6, 7}
    if odd:
        return f"the weights are {odd.pop()}-bit integers, which lpconv does not read in layout `{method}`"
    return None if tool is None else f"the checkpoint is quantised by {tool}, which lpconv does not read"


def _has_words(scales: str, headers: Headers) -> bool:
    """Whether the codes next to these scales are 32-bit words under the weight's own name, as only in mlx."""
    weight = headers.root.get(f"{scales.rpartition('.')[0]}.weight")
    return weight is not None and weight.dtype == "U32"


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
