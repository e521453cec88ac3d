"""Merging adapters: the product, what codes keep of it, and adapters that are refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lpconv
from lpconv.data import demo_text
from lpconv.errors import InputError, LpconvError, UnsupportedError, UsageError
from lpconv.layouts.reader import stored_shapes
from lpconv.progress import Silent
from lpconv.results import FinetuneResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json
from lpconv.train.adapter import Adapter
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.recover import Distillation
from lpconv.train.recoverable import check_recoverable
from lpconv.train.run import finetune
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import bits_of, converted_demo, run_cli
from tests.helpers.models import IDS, tiny_model

FORMS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "granularity": "group:32", "layout": "compressed-tensors"},
    "NVFP4": {"scheme": "NVFP4A16"},
}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def outputs(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return converted_demo(tmp_path_factory.mktemp("forms"), FORMS)


@pytest.fixture(scope="module")
def adapter(outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter of every linear layer but the head."""
    folder, how = tmp_path_factory.mktemp("adapter") / "lora", arithmetic(lora=4, precision="fp32")
    options = FinetuneOptions(arithmetic=how, steps=12, batch_size=8, seq_len=64, eval_batches=2, lr=3e-3, twin="none")
    finetune(str(outputs["int4"]), folder, options)
    return folder


def _write(folder: Path, model: nn.Module, *, std: float, **settings: Any) -> Path:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.ndim == 2 and name.startswith(("model.layers.", "transformer.h.")):
            shape = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
            for end, size in (("A", (4, shape[1])), ("B", (shape[0], 4))):
                tensors[f"base_model.model.{name}.lora_{end}.weight"] = (
                    torch.randn(size, generator=generator) * std**0.5
                )
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none", "task_type": "CAUSAL_LM"}
    config |= {"use_qalora": False, "qalora_group_size": 16, "loftq_config": {}}  # PEFT writes unused settings, too
    modules = sorted({n.split(".")[-3] for n in tensors})
    (folder / CONFIG).write_text(json.dumps({**config, "target_modules": modules, **settings}))
    return folder


def _merge(base: Path, adapter: Path, output: Path, **more: Any) -> FinetuneResult:
    small: dict[str, Any] = {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 2}
    how = arithmetic(recover=True, precision="fp32")
    return finetune(str(base), output, FinetuneOptions(arithmetic=how, source=str(adapter), **(small | more)))


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"lora_alpha": 3},
        {"alpha_pattern": {r"0\..*": 12, "(self_)?attn.[cq]_.*": 1, "mlp": 7}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_merged_weight_is_that_of_the_formula_and_of_peft(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(family)
    folder = _write(tmp_path / "lora", model, std=0.1, fan_in_fan_out=family == "gpt2", **settings)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    shapes = {n: tuple(p.shape) for n, p in before.items()}
    Adapter.open(folder, shapes, shapes).merge_into(model)

    rank = 2 if "use_rslora" in settings else 4
    tensors, num_changed = load_file(folder / WEIGHTS), 0
    for name, p in model.named_parameters():
        pair = [f"base_model.model.{name.removesuffix('.weight')}.lora_{end}.weight" for end in "AB"]
        wanted = before[name].double()
        if pair[0] in tensors:
            own = 12 if ".0." in name else 1 if "attn.c_" in name or "attn.q_" in name else 4
            alpha = own if "alpha_pattern" in settings else settings.get("lora_alpha", 4)
            update = alpha / rank * (tensors[pair[1]].double() @ tensors[pair[0]].double())
            wanted += update.T if family == "gpt2" else update
        torch.testing.assert_close(p.double(), wanted, rtol=1e-6, atol=1e-6)
        num_changed += not torch.equal(p, before[name])
    assert num_changed == len(tensors) // 2 > 0

    peft = pytest.importorskip("peft")
    plain = tiny_model(family)
    plain.load_state_dict(before, strict=False)
    theirs = peft.PeftModel.from_pretrained(plain, folder)
    torch.testing.assert_close(_logits(theirs), _logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_scales_or_codes_approach_the_model_with_the_adapter(
    form: str, outputs: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    lr, steps = (None, 40) if form == "int4" else (0.4, 2)  # codes need more steps to approach it
    result = _merge(outputs[form], adapter, tmp_path / "out", steps=steps, lr=lr, batch_size=8, seq_len=64)
    start, wanted, got = (lpconv.load(p, dtype=torch.float32) for p in (outputs[form], outputs[form], tmp_path / "out"))
    shapes = stored_shapes(Checkpoint.open(outputs[form]))
    Adapter.open(adapter, shapes, shapes).merge_into(wanted)
    tokenizer = transformers.AutoTokenizer.from_pretrained(outputs[form])
    ids = torch.tensor(tokenizer(demo_text("heldout").read_text())["input_ids"][:512]).view(4, 128)
    with torch.no_grad():
        s, t, h = (m(ids).logits.double().log_softmax(-1) for m in (start, wanted, got))
    before, after = (float((t.exp() * (t - x)).sum(-1).mean()) for x in (s, h))
    assert result.update_kept is not None
    (kept,) = (r.kept_by_layer for r in result.runs)
    assert len(kept) == start.config.num_hidden_layers
    if form == "int4":
        assert after < 0.5 * before
        assert result.update_kept == pytest.approx(1 - math.sqrt(after / before), abs=0.1)
        assert not (tmp_path / "out" / "runs" / "merged").exists()

    stored = [load_file(x / "model.safetensors") for x in (outputs[form], tmp_path / "out")]
    changed = {n for n, x in stored[0].items() if not torch.equal(x.view(torch.uint8), stored[1][n].view(torch.uint8))}
    assert changed
    assert all(n.endswith(("_scale", "_packed")) for n in changed)  # norms and embeddings keep their bits
    assert verify_output(tmp_path / "out", VerifyOptions(), progress=Silent()).passed
    merged = Checkpoint.open(tmp_path / "out")
    assert check_recoverable(merged, str(adapter)).adapter is not None  # a second adapter has the same base
    with pytest.raises(UnsupportedError):  # recovery would train the update away
        check_recoverable(merged, None)


def test_codes_that_the_adapter_does_not_reach_keep_their_bits(shallow: Path, tmp_path: Path) -> None:
    """Also an embedding in 16 bits, with a scale that its rounded numbers would not give again."""
    base = converted_demo(tmp_path, {"base": {"format": "int4", "granularity": "group:32"}})["base"]
    folder = _write(tmp_path / "lora", lpconv.load(base), std=0.01)
    _merge(base, folder, tmp_path / "out", steps=1)
    before, after = (load_file(x / "model.safetensors") for x in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {n.removesuffix("_scale") for n, x in before.items() if bits_of(x) != bits_of(after[n])}
    assert changed == {n for n in before if n.endswith("proj.weight")}


def test_an_adapter_without_prefix_and_factor_has_the_defaults_of_peft(tmp_path: Path) -> None:
    model, name = tiny_model("llama"), "layers.1.self_attn.v_proj"
    folder = _write(tmp_path / "lora", model, std=0.1)
    a, b = torch.randn(4, 32), torch.randn(16, 4)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / WEIGHTS)
    config = read_json(folder / CONFIG)
    (folder / CONFIG).write_text(json.dumps({n: x for n, x in config.items() if n != "lora_alpha"}))
    before = model.get_parameter(f"model.{name}.weight").detach().clone()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    Adapter.open(folder, shapes, shapes).merge_into(model)
    torch.testing.assert_close(model.get_parameter(f"model.{name}.weight"), before + 2 * b @ a)


def test_matrices_of_stacked_experts_are_refused(tmp_path: Path) -> None:
    model, name = tiny_model("mixtral"), "model.layers.0.block_sparse_moe.experts.0.w1"
    folder = _write(tmp_path / "lora", model, std=0.1)
    pair = {
        f"base_model.model.{name}.lora_{end}.weight": torch.ones(size) for end, size in (("A", (4, 32)), ("B", (48, 4)))
    }
    save_file(pair, folder / WEIGHTS)
    shapes = {f"{name}.weight": (48, 32)}  # as transformers saves them
    with pytest.raises(UnsupportedError):
        Adapter.open(folder, shapes, shapes).merge_into(model)


def test_the_divergence_is_the_mean_over_all_tokens() -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    batches = [{"input_ids": x, "labels": x} for x in (IDS, IDS[:1].flip(1))]
    with torch.no_grad():
        q, p = (
            torch.cat([m(b["input_ids"]).logits for b in batches]).double().log_softmax(-1) for m in (model, teacher)
        )
    wanted = float((p.exp() * (p - q)).sum(-1).mean())
    assert Distillation(teacher).divergence(model, batches) == pytest.approx(wanted, rel=1e-4)


def test_the_share_of_a_layer_that_should_not_change_is_undefined_if_it_did() -> None:
    start, teacher, model = (tiny_model("llama", num_hidden_layers=3) for _ in range(3))
    with torch.no_grad():
        teacher.model.layers[2].mlp.up_proj.weight.add_(0.1)
        model.model.layers[1].mlp.up_proj.weight.add_(0.1)
    first, second, third = Distillation(teacher).kept_by_layer(start, model, {"input_ids": IDS})
    assert first == 1
    assert math.isnan(second)
    assert third < 0.5


def test_states_of_layers_are_compared_in_fp64(adapter: Path, outputs: dict[str, Path]) -> None:
    start, teacher, halfway = (lpconv.load(outputs["int4"], dtype=torch.float32) for _ in range(3))
    shapes = stored_shapes(Checkpoint.open(outputs["int4"]))
    opened = Adapter.open(adapter, shapes, shapes)
    opened.merge_into(teacher)
    with torch.no_grad():
        for p, q in zip(halfway.parameters(), teacher.parameters(), strict=True):
            p.add_(q).div_(2)
    batch = {"input_ids": IDS, "labels": IDS}
    distillation = Distillation(teacher)
    assert distillation.kept_by_layer(start, start, batch) == (0.0,) * start.config.num_hidden_layers
    assert distillation.kept_by_layer(start, teacher, batch) == (1.0,) * start.config.num_hidden_layers
    got = distillation.kept_by_layer(start, halfway, batch)
    with torch.no_grad():
        s, t, h = (
            m.double().model(IDS, output_hidden_states=True).hidden_states[1:] for m in (start, teacher, halfway)
        )
    for layer, share in enumerate(got):
        assert share == pytest.approx(1 - float((h[layer] - t[layer]).norm() / (s[layer] - t[layer]).norm()), abs=1e-4)


def test_the_command_merges_and_its_gate_decides(outputs: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    words = ["merge", outputs["int4"], adapter, "--data", text, "--steps", "1", "--seq-len", "16", "--batch-size", "2"]
    done = run_cli(*map(str, words), "--gate", "update_kept>=0.99", "--json", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    document = json.loads(done.stdout)
    assert [g["passed"] for g in document["error"]["details"]["result"]["gates"]] == [False]
    output = tmp_path / f"{outputs['int4'].name}-merged"
    report = read_json(output / "report.json")
    assert report["source"].split()[-1] == "lora"
    assert " 128 " in report["facts"]["Start"]  # tokens that rounding the merged weights would need


def _edit(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = read_json(folder / CONFIG)
        (folder / CONFIG).write_text(json.dumps({**config, **settings}))

    return change


def _rename(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {n.replace(old, new): x for n, x in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS)

    return change


REFUSED: dict[str, tuple[Callable[[Path], object], type[LpconvError]]] = {
    "DoRA": (_edit(use_dora=True), UnsupportedError),
    "another kind": (_edit(peft_type="IA3"), UnsupportedError),
    "trained biases": (_edit(bias="all"), UnsupportedError),
    "no factor of a layer": (_edit(alpha_pattern={"q_proj": None}), InputError),
    "a start that changes the base": (_edit(init_lora_weights="pissa"), UnsupportedError),
    "a setting from the future": (_edit(new_kind={"a": 1}), UnsupportedError),
    "magnitudes": (_rename("layers.0.mlp.up_proj.lora_B", "layers.0.mlp.up_proj.lora_magnitude"), UnsupportedError),
    "the head": (_rename("model.layers.0.self_attn.q_proj", "lm_head"), LpconvError),
    "another model": (_rename("self_attn", "attention"), InputError),
    "a convolution": (
        lambda f: _write_over(f, "model.layers.0.mlp.up_proj", torch.zeros(4, 3, 1, 1)),
        UnsupportedError,
    ),
    "another size": (lambda f: _write_over(f, "model.layers.0.mlp.up_proj", torch.zeros(4, 3)), InputError),
    "no factor": (_edit(lora_alpha=None), InputError),
    "rank 0": (lambda f: _write_over(f, "model.layers.0.mlp.up_proj", torch.zeros(0, 128)), InputError),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), InputError),
    "NaN": (lambda f: _write_over(f, "model.layers.0.mlp.up_proj", torch.full((4, 128), math.nan)), InputError),
    "a damaged header": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 64), InputError),
}


def _write_over(folder: Path, module: str, a: Tensor) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{module}.lora_A.weight"] = a
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_merged_are_refused(
    case: str, outputs: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    change, error = REFUSED[case]
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    change(folder)
    with pytest.raises(error):
        _merge(outputs["int4"], folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_kind_is_named_and_not_its_settings(outputs: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    _edit(peft_type="IA3", feedforward_modules=["up_proj"])(folder)
    with pytest.raises(UnsupportedError, match="IA3"):
        _merge(outputs["int4"], folder, tmp_path / "out")


def test_an_adapter_with_another_base_is_merged_and_named(
    outputs: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    messages = list[str]()

    class Log(Silent):
        def message(self, text: str) -> None:
            messages.append(text)

    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    for base, num in (("org/other-7b", 1), ("org/demo/", 0), (str(outputs["int4"]), 0)):
        _edit(base_model_name_or_path=base)(folder)
        how = arithmetic(recover=True, precision="fp32")
        options = FinetuneOptions(arithmetic=how, source=str(folder), steps=1, batch_size=2, seq_len=16, eval_batches=2)
        messages.clear()
        with pytest.raises(LpconvError) as refused:  # before the work, which the place inside the adapter prevents
            finetune(str(outputs["int4"]), folder / "out", options, progress=Log())
        assert str(folder) in str(refused.value)
        assert sum(base in m for m in messages) == num


@pytest.mark.parametrize("place", ["", "merged"])
def test_the_output_is_never_the_adapter_or_in_it(
    place: str, outputs: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))  # `finetune` wrote it, so --force may replace it
    with pytest.raises(LpconvError):
        _merge(outputs["int4"], folder, folder / place, force=True)
    assert (folder / WEIGHTS).is_file()
    assert not (folder / "merged").exists()


def test_a_gate_on_the_gap_is_refused_by_the_metrics_that_merging_has(
    outputs: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="adapters") as refused:
        _merge(outputs["int4"], adapter, tmp_path / "out", gates=("loss_gap<=1",))
    assert "update_kept" in str(refused.value.hint)


def test_a_gate_on_the_update_needs_an_adapter(outputs: dict[str, Path], tmp_path: Path) -> None:
    how = arithmetic(recover=True)
    with pytest.raises(UsageError, match="adapter"):
        finetune(str(outputs["int4"]), tmp_path / "out", FinetuneOptions(arithmetic=how, gates=("update_kept>=0.9",)))
