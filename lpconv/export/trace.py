"""The model of a checkpoint in fp32, inputs to trace it with, and its ONNX graph.

The initializers of the graph are named after the model's parameters. A decoder can also have the keys and values of
earlier tokens as inputs and outputs, named as Optimum names them. Layers with a sliding window keep all keys, too: the
mask hides those outside of the window.

Letters in shapes: B batch, L tokens of this step, P earlier tokens, T = P + L, H heads with keys, D size of a head.
"""

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lpconv.errors import UnsupportedError, typed_line
from lpconv.export.options import NO_CACHE_HINT, PAST
from lpconv.machine import out_of_memory
from lpconv.models.empty import check_memory, num_parameters
from lpconv.models.inputs import dynamic_axes, random_ids, resize_inputs, tracing_inputs, vocabulary_size
from lpconv.models.opening import Opened, model_errors, open_to_trace, read_text_config
from lpconv.models.tasks import CLM, architecture, cache_argument, resolve_auto_class, task_of
from lpconv.progress import quiet_transformers
from lpconv.storage.checkpoint import Checkpoint

# The model, ONNX Runtime's copy of it, and the fp32 values into which it folds 16-bit weights.
_COPIES_IN_MEMORY = 3
_HINT = "please report it with the model's config.json; `lpconv convert` works without an export"
_OP = re.compile(r"target=torch\.ops\.([\w.]+)")
_PREFIX = "model."
# Rules of onnxscript for operations without effect, and for two in a row that are one.
_RULES = (
    "add_0", "sub_0", "mul_by_1", "div_by_1", "dropout_zero", "dropout_inference", "collapse_slice", "collapse_slice2",
    "squeeze_reshape_1d", "cast_cast", "no_op_cast", "no_op_expand", "no_op_transpose", "reshape_reshape",
    "transpose_transpose", "unsqueeze_unsqueeze", "no_op_dynamic_scatter_nd", "no_op_static_scatter_nd",
    "cast_constant_of_shape", "cast_constant_of_shape_without_value", "materialize_reshape_shape",
    "one_reshape_matmul_reshape", "two_reshapes_matmul_reshape",
)  # fmt: skip
_PRESENT = "present."
_STEP_AXES = {0: "batch", 1: "sequence"}
_AXES = {"attention_mask": {0: "batch", 1: "total_sequence"}}
_PAST_AXES = {0: "batch", 2: "past_sequence"}
# Batch, earlier tokens and tokens of each checked step, the traced one first; see `models.inputs._TRACED`.
_STEPS = ((2, 10, 13), (3, 0, 9), (3, 8, 1))

TracedCase = tuple[dict[str, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Traceable:
    """A model in evaluation mode, the inputs to trace it with, and the names of the exported inputs and outputs.

    `axes` are the dynamic axes of each input (position → name). `forward` computes the `outputs` in order. `cases` are
    inputs with their right outputs, to check the graph with. `missing` are parameters that the checkpoint lacks.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    axes: dict[str, dict[int, str]]
    outputs: tuple[str, ...]
    forward: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, ...]]
    cases: tuple[TracedCase, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter under each of its names. A tied weight has several, and the graph uses one of them."""
        return {name: p.detach() for name, p in self.model.named_parameters(remove_duplicate=False)}


def open_traceable(checkpoint: Checkpoint) -> Traceable:
    """Open a checkpoint for tracing. Without weights for its architecture's head, the base model is opened.

    Raises UnsupportedError for models that transformers does not open or that lpconv has no inputs for, ResourceError
    if memory is insufficient.
    """
    opened = open_in_memory(checkpoint)
    inputs = tracing_inputs(opened.model)
    cases = (inputs, resize_inputs(inputs))
    with running():
        outputs = [opened.model(**case) for case in cases]
    name = next((k for k in ("logits", "last_hidden_state") if outputs[0].get(k) is not None), None)
    if name is None:
        raise UnsupportedError(f"{type(opened.model).__name__} returns no logits", hint="this model cannot be exported")
    return Traceable(
        model=opened.model,
        inputs=inputs,
        axes={input_name: dynamic_axes(input_name) for input_name in inputs},
        outputs=(name,),
        forward=lambda model, given: (model(**given)[name],),
        cases=tuple((case, (out[name],)) for case, out in zip(cases, outputs, strict=True)),
        missing=opened.missing,
    )


def open_in_memory(checkpoint: Checkpoint) -> Opened:
    """Open a model to trace it. Raises ResourceError, before it reads weights, if memory is insufficient."""
    check_memory(num_parameters(checkpoint), copies=_COPIES_IN_MEMORY, what="exporting")
    return open_to_trace(checkpoint)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Run a model without gradients. Raises UnsupportedError if it fails."""
    hint = "this model cannot be exported"
    with quiet_transformers(), torch.inference_mode(), model_errors("the model fails when it runs", hint=hint):
        yield


def open_with_cache(checkpoint: Checkpoint) -> Traceable:
    """Open a decoder for tracing one step of generation. Right outputs come from PyTorch without a cache.

    Raises UnsupportedError, before it reads weights, for models that keep anything but keys and values.
    """
    has_positions = _takes_positions(checkpoint)
    opened = open_in_memory(checkpoint)
    model = opened.model
    with running():
        cases = [_cached_case(model, *step, has_positions=has_positions) for step in _STEPS]
    inputs = {name: x.clone() for name, x in cases[0][0].items()}  # outside of inference mode, for torch.export
    return Traceable(
        model=model,
        inputs=inputs,
        axes={n: _PAST_AXES if n.startswith(PAST) else _AXES.get(n, _STEP_AXES) for n in inputs},
        outputs=("logits", *(n.replace(PAST, _PRESENT) for n in inputs if n.startswith(PAST))),
        forward=_step,
        cases=tuple(cases),
        missing=opened.missing,
    )


def _takes_positions(checkpoint: Checkpoint) -> bool:
    """Whether the model takes position ids. Raises UnsupportedError if it cannot take keys and values."""
    config = read_text_config(checkpoint, hint=NO_CACHE_HINT)
    model_class = resolve_auto_class(architecture(checkpoint.config), config)
    parameters = inspect.signature(model_class.forward).parameters
    layers = DynamicCache(config=config).layers
    other = next((type(x).__name__ for x in layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if task_of(model_class.__name__) is not CLM or cache_argument(model_class) is None:
        raise UnsupportedError(f"`{model_class.__name__}` does not generate with a cache", hint=NO_CACHE_HINT)
    if other is not None:
        raise UnsupportedError(
            f"`{model_class.__name__}` has layers with a `{other}`, not only keys and values", hint=NO_CACHE_HINT
        )
    return "position_ids" in parameters


def _cached_case(model: nn.Module, batch: int, num_past: int, num_tokens: int, *, has_positions: bool) -> TracedCase:
    """A step after `num_past` tokens, and its right outputs from one run over all tokens. Half of a row is padding."""
    ids_BT = random_ids((batch, num_past + num_tokens), vocabulary_size(model.config), seed=num_past)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, : ids_BT.shape[1] // 2] = 0
    whole = {"input_ids": ids_BT, "attention_mask": mask_BT}
    if has_positions:
        whole["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits = model(**whole).logits
    _, *present = _step(model, whole)
    step = {name: x if name in _AXES else x[:, num_past:].contiguous() for name, x in whole.items()}
    names = (f"{PAST}{layer}.{kind}" for layer in range(len(present) // 2) for kind in ("key", "value"))
    past = {name: x[:, :, :num_past].contiguous() for name, x in zip(names, present, strict=True)}
    return {**step, **past}, (logits[:, num_past:], *present)


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Logits [B, L, vocabulary], and the keys and values [B, H, T, D] of each layer."""
    past = [x for name, x in inputs.items() if name.startswith(PAST)]
    others = {name: x for name, x in inputs.items() if not name.startswith(PAST)}
    cache = DynamicCache(ddp_cache_data=list(zip(past[::2], past[1::2], strict=True)))
    argument = cache_argument(type(model)) or ""
    logits: Tensor = model(**others, **{argument: cache}, use_cache=True).logits
    return (logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))


class _Positional(nn.Module):
    """The exported function of a model: positional tensors in, a tuple of tensors out."""

    def __init__(self, traceable: Traceable) -> None:
        super().__init__()
        self.model = traceable.model
        self._names, self._forward = tuple(traceable.inputs), traceable.forward

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._forward(self.model, dict(zip(self._names, inputs, strict=True)))


def trace(traceable: Traceable, *, opset: int) -> ir.Model:
    """The ONNX graph of a model in fp32, with its dynamic axes.

    Constants are folded but weights are not: they stay initializers under their parameters' names. Raises
    UnsupportedError with the name of the module that PyTorch cannot capture, or of the operator (and its module) that
    ONNX lacks.
    """
    with _silence_exporter():
        program = _capture(_Positional(traceable).eval(), traceable)
        graph = _translate(program, traceable, opset)
    reached = graph.opset_imports.get("")
    if reached != opset:
        raise UnsupportedError(
            f"the installed torch and onnxscript write opset {reached} for this model, not {opset}",
            hint=f"pass --opset {reached}",
        )
    _clean(graph)
    _fold_constants(graph, set(traceable.parameters))
    return graph


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Silence the exporter's warnings, which are meant for its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _capture(wrapper: nn.Module, traceable: Traceable) -> torch.export.ExportedProgram:
    inputs = tuple(traceable.inputs.values())
    dynamic = tuple(dict.fromkeys(traceable.axes[name], torch.export.Dim.AUTO) for name in traceable.inputs)
    entered: list[str] = []
    hooks = list(_track_modules(wrapper, entered))
    try:
        return torch.export.export(
            wrapper, inputs, dynamic_shapes=(dynamic,), strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
    except Exception as e:  # tracing runs the model's own code, which may raise anything
        where = entered[-1].removeprefix(_PREFIX) if entered else "the model"
        raise out_of_memory(e) or UnsupportedError(
            f"PyTorch cannot capture `{where}`: {typed_line(e)}", hint=_HINT, details={"module": where}
        ) from e
    finally:
        for hook in hooks:
            hook.remove()


def _track_modules(wrapper: nn.Module, entered: list[str]) -> Iterator[Any]:
    """Hooks that keep `entered` as the stack of running modules; if a module raises, its name is last."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.pop()

    for name, module in wrapper.named_modules():
        if name:
            yield module.register_forward_pre_hook(lambda _, __, name=name: entered.append(name))
            yield module.register_forward_hook(leave)


def _translate(program: torch.export.ExportedProgram, traceable: Traceable, opset: int) -> ir.Model:
    names = list(traceable.inputs)
    try:
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=(tuple(traceable.axes[name] for name in names),),  # names of the axes
            input_names=names,
            output_names=list(traceable.outputs),
            optimize=False,  # optimising would fold the transposes of small weights into new initializers
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as e:
        match = _OP.search(str(e))
        op = match[1] if match else "an operator"
        where = _module_of(program, op)
        raise UnsupportedError(
            f"`{op}` in module `{where}` has no equivalent in ONNX opset {opset}",
            hint=_HINT,
            details={"op": op, "module": where},
        ) from e
    assert exported is not None
    model: ir.Model = exported.model
    return model


def _module_of(program: torch.export.ExportedProgram, op: str) -> str:
    """The name in the model of the innermost module that calls `op`."""
    for node in program.run_decompositions().graph.nodes:
        if str(node.target) == op:
            paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
            return next((p.removeprefix(_PREFIX) for p in reversed(paths) if p.startswith(_PREFIX)), "the model")
    return "unknown"


def _clean(graph: ir.Model) -> None:
    """Name initializers as in the model, not our wrapper, and remove stack traces, which contain local paths."""
    for name, value in list(graph.graph.initializers.items()):
        if name.startswith(_PREFIX):
            value.name = name.removeprefix(_PREFIX)
    graph.metadata_props.clear()
    graph.graph.metadata_props.clear()
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*graph.graph.inputs, *graph.graph.initializers.values()):
        value.metadata_props.clear()


def _fold_constants(graph: ir.Model, parameters: set[str]) -> None:
    """Fold constants, and remove operations that change nothing.

    These are the steps of `onnxscript.optimizer.optimize_ir`, without rules for convolutions and for slices that split
    a tensor. The latter goes through the whole graph at each of its nodes, which takes minutes with 30 layers.
    """
    # All of it needs the onnx extra.
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules import common as rules

    def should_fold(node: ir.Node) -> bool | None:
        return False if any(v is not None and v.name in parameters for v in node.inputs) else None

    without_effect = RewritePass([getattr(rules, f"{name}_rule") for name in _RULES])
    common.InlinePass()(graph)
    for _ in range(2):
        fold_constants_ir(graph, onnx_shape_inference=True, should_fold=should_fold)
        without_effect(graph)
        common.RemoveUnusedNodesPass()(graph)
        common.RemoveUnusedFunctionsPass()(graph)
        common.RemoveUnusedOpsetsPass()(graph)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    common.LiftSubgraphInitializersToMainGraphPass()(graph)
    common.DeduplicateInitializersPass()(graph)
    common.CommonSubexpressionEliminationPass()(graph)
    common.OutputFixPass()(graph)
    common.NameFixPass()(graph)
