"""Read a LoRA adapter in PEFT's format and add it to a model: W + (α/r) B A (Hu et al. 2021, arXiv 2106.09685)."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lpconv.errors import InputError, UnsupportedError
from lpconv.lookup import is_same_name
from lpconv.report.numbers import code_list
from lpconv.storage.contents import ADAPTER, read_json
from lpconv.storage.header import read_header

WEIGHTS = "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # of names
# Settings that say nothing about the product, or that `Adapter.scale` and the tensors account for.
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_rslora",
}  # fmt: skip
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # of `init_lora_weights` that leave W as it is
_HINT = "merge it with PEFT's merge_and_unload, and convert the result"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter for the linear layers `modules`."""

    folder: Path
    config: Mapping[str, Any]
    modules: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, shapes: Mapping[str, tuple[int, ...]], coded: Collection[str]) -> Self:
        """Check an adapter, from its config and header alone, for a model with weights of `shapes`.

        Raises UnsupportedError for another kind of adapter, and if it changes weights other than those in `coded`;
        InputError if its files are damaged or belong to another model.
        """
        config = read_json(folder / ADAPTER)
        if not (folder / WEIGHTS).is_file():
            raise InputError(f"`{folder}` has no {WEIGHTS}", hint="save the adapter with PEFT's save_pretrained")
        unknown = sorted(n for n, x in config.items() if n not in _KNOWN and x and (n, x) != ("bias", "none"))
        unknown += ["init_lora_weights"] * (config.get("init_lora_weights") not in _STARTS)
        alphas = {"lora_alpha": config.get("lora_alpha", 8), **(config.get("alpha_pattern") or {})}
        if wrong := [n for n, x in alphas.items() if not isinstance(x, (int, float))]:
            raise InputError(f"`{folder / ADAPTER}` has no number as `{wrong[0]}`", hint="save the adapter again")
        if (kind := config.get("peft_type")) != "LORA" or unknown:
            what = f"sets {code_list(unknown)}" if kind == "LORA" else f"is of type {kind}"
            raise UnsupportedError(f"the adapter `{folder.name}` {what}, but only plain LoRA is merged", hint=_HINT)
        stored = {n.removeprefix(PREFIX): i.shape for n, i in read_header(folder / WEIGHTS).tensors.items()}
        modules = [n.removesuffix(A) for n in stored if n.endswith(A)]
        pairs = {n + end for n in modules for end in (A, B)}
        odd = stored.keys() ^ pairs or {n for n in pairs if len(stored[n]) != 2}  # those of convolutions have 4 axes
        if odd or not modules:
            what = code_list(sorted(odd)) if odd else "no matrices"
            raise UnsupportedError(f"the adapter `{folder.name}` has {what} besides pairs of A and B", hint=_HINT)
        for n in modules:
            alike = [x for x in shapes if is_same_name(x, f"{n}.weight")]
            named = [x for x in alike if x == f"{n}.weight"] or alike
            weight = named[0] if len(named) == 1 else None
            (rank, inputs), (outputs, again) = stored[n + A], stored[n + B]
            if weight is None or {*shapes[weight]} != {inputs, outputs} or not rank == again > 0:
                raise InputError(
                    f"the adapter `{folder.name}` changes `{n}`, and the model has no such layer of its shape",
                    hint="pass the adapter of this model",
                )
            if weight not in coded:
                raise UnsupportedError(
                    f"the adapter `{folder.name}` changes `{weight}`, which is not stored as codes", hint=_HINT
                )
        return cls(folder=folder, config=config, modules=tuple(modules))

    def scale(self, module: str, rank: int) -> float:
        """The factor of B A. PEFT divides by √r for rank-stabilised LoRA (Kalajdzievski 2023, arXiv 2312.03732)."""
        patterns = self.config.get("alpha_pattern") or {}
        own = [x for pattern, x in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]  # the first decides
        alpha = float((own or [self.config.get("lora_alpha", 8)])[0])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def merge_into(self, model: Any) -> None:
        """Add the products to the weights of a model in fp32."""
        from safetensors.torch import load_file

        from lpconv.layers import linears

        tensors = {n.removeprefix(PREFIX): x for n, x in load_file(self.folder / WEIGHTS).items()}
        layers = {x.name: x for x in linears(model)}
        for name in self.modules:
            a, b = (tensors[name + end].float() for end in (A, B))
            layer = layers.get(name) or next((x for n, x in layers.items() if is_same_name(n, name)), None)
            if layer is None:  # transformers has made it a part of another one, such as stacked experts
                raise UnsupportedError(f"the model computes `{name}` in no linear layer of its own", hint=_HINT)
            update = (b @ a).mul_(self.scale(name, len(a)))
            weight: Any = layer.module.weight
            weight.data += update.T if layer.kind == "Conv1D" else update  # Conv1D stores Wᵀ
