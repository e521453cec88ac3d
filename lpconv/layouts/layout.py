"""`Layout`: what lpconv knows of the checkpoints of one tool, to read and to write them. No torch here."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpconv.forms.facts import Headers
from lpconv.forms.form import Form, Stored


@dataclass(frozen=True)
class Scheme:
    """Values of `ConvertOptions` under one well-known name; "" for those that it leaves open.

    `bits` are stored bits per weight including scales, for a matrix of 4096 columns. `opens` lists the readers of the
    output, and `use` when to choose the scheme. `calibrated`: the input scales need a text (`--calibrate`). `inputs`
    is given where the same weights may also be served with other inputs.
    """

    name: str
    format: str
    granularity: str
    bits: float
    opens: str
    use: str
    calibrated: bool = False
    inputs: str = ""
    method: str = ""
    residual: str = ""
    layout: str = ""

    def is_opened_by(self, runtime: str) -> bool:
        """Whether a runtime, such as "vllm", opens the output without lpconv."""
        return runtime in self.opens.lower() and "lpconv" not in self.opens

    @property
    def options(self) -> dict[str, str]:
        """The values by option."""
        given = {n: getattr(self, n) for n in ("method", "layout", "format", "granularity", "residual", "inputs")}
        return {n: value for n, value in given.items() if value}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one tool stores checkpoints.

    `methods` are the values of `quant_method` in config.json that name the layout. `read` finds the weight whose codes
    have a name, or None if this layout has no such codes; the caller checks `Stored.agrees`. `why_unreadable` names the
    settings of a config that lpconv does not read, and `unread_part` a tensor that only this tool writes, in files that
    lpconv does not read. `inputs` are the settings by which readers round the inputs of a quantised module, as in
    compressed-tensors, or None. The `dequantizer` is the config class of transformers that decodes it on a CPU, where
    it cannot multiply it.

    For finding defects: `is_judged` means that `inspect` judges the scales. In a layout that `mixes_types`, weights
    that belong together may have different ones, and all may be plain numbers. `numbers_of` has the number formats that
    each value of the config's setting `numbers_key` allows. With `excludes_by_name`, the config must name every module
    that is not quantised although others of its kind are.

    The rest is for layouts that lpconv writes: the `form` of converted tensors (None for lpconv's own, where methods
    have different ones), the `schemes`, and for model cards how to open a checkpoint: `opening`, with `{codes}`, and
    lines of `python`, with `{auto}` and `{path}`. `tag` and `library`, which opens it, are those of the hub; `served`
    are the formats and beginnings of granularities that vLLM was seen to serve (docs/layouts.md). `has_cache_scales`:
    it can store scales of keys and values. `fused_by` names its readers that fuse weights, such as q/k/v, which then
    need one format. `file` is the only file, to which `{path}` then leads; else empty.
    """

    name: str
    methods: tuple[str, ...]
    read: Callable[[str, Headers], Stored | None]
    why_unreadable: Callable[[Mapping[str, Any]], str | None] = lambda settings: None
    unread_part: Callable[[Headers], str | None] = lambda headers: None
    inputs: Callable[[Mapping[str, Any], str], Mapping[str, Any] | None] = lambda settings, module: None
    dequantizer: str = ""
    is_judged: bool = True
    mixes_types: bool = False
    numbers_key: str = "format"
    numbers_of: Mapping[str, Container[str]] = field(default_factory=dict)
    excludes_by_name: bool = False
    form: type[Form] | None = None
    schemes: tuple[Scheme, ...] = ()
    opening: str = ""
    python: tuple[str, ...] = ("from transformers import {auto}", "model = {auto}.from_pretrained({path!r})")
    tag: str = ""
    library: str = "transformers"
    served: tuple[tuple[str, str], ...] = ()
    has_cache_scales: bool = False
    fused_by: str = ""
    file: str = ""
