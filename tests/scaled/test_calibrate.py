"""Scales measured on data: exact as any other, and data near 1 at every edge."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lpconv.errors import InputError, UsageError
from lpconv.formats.scale import rms
from lpconv.layers import weighted_modules
from lpconv.scaled import (
    EdgeFactors,
    apply_factors,
    calibrate,
    fallbacks,
    from_disk,
    read_factors,
    scaled,
    to_disk,
    write_factors,
)
from lpconv.scaled.calibrate import _Magnitudes, _scale_of
from tests.helpers.scaled_models import build, loss_and_grads


@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_calibrated_scales_keep_loss_and_gradients_bit_for_bit(name: str) -> None:
    plain, batch = build(name)
    ours = scaled(copy.deepcopy(plain), strict=True)
    loss, grads = loss_and_grads(plain, batch)

    factors = calibrate(ours, [batch])
    our_loss, our_grads = loss_and_grads(ours, batch)

    assert any(f.forward != 1 for f in factors.values())
    assert any(f.backward != 1 for f in factors.values())
    assert torch.equal(our_loss, loss)
    assert [n for n, g in our_grads.items() if not torch.equal(g.dequantize(), grads[n])] == []


@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_data_at_every_calibrated_edge_has_unit_scale(name: str) -> None:
    plain, batch = build(name)
    ours = scaled(copy.deepcopy(plain))
    calibrate(ours, [batch])
    sizes: dict[tuple[str, str], float] = {}

    def watch(key: str, module: nn.Module) -> None:
        def after_factor(_: nn.Module, __: object, out: Tensor) -> None:
            sizes[key, "forward"] = float(rms(out.data_part))

        def before_factor(_: nn.Module, __: object, out: Tensor) -> None:  # whose gradient is past the factor
            out.register_hook(lambda g: sizes.__setitem__((key, "backward"), float(rms(g.data_part))))

        module.register_forward_hook(after_factor)
        module.register_forward_hook(before_factor, prepend=True)

    for key, module in weighted_modules(ours).items():
        watch(key, module)
    ours(**batch).loss.backward()

    assert len(sizes) == 2 * len(weighted_modules(ours))
    cancelled = {key for key, size in sizes.items() if size == 0}
    assert all(1 <= size < 2 for key, size in sizes.items() if key not in cancelled), sizes
    assert not cancelled


def test_a_saved_model_computes_with_its_calibrated_scales_again(tmp_path: Path) -> None:
    plain, batch = build("gpt2")
    ours = scaled(copy.deepcopy(plain), compute="fp8", operand_scale="static")
    write_factors(tmp_path, calibrate(ours, [batch]))
    save_file(to_disk(ours), tmp_path / "model.safetensors")
    _, expected = loss_and_grads(ours, batch)

    again = scaled(build("gpt2")[0], compute="fp8", operand_scale="static")
    from_disk(again, load_file(tmp_path / "model.safetensors"))
    _, without = loss_and_grads(copy.deepcopy(again), batch)
    apply_factors(again, read_factors(tmp_path))
    _, found = loss_and_grads(again, batch)

    assert all(torch.equal(found[n].dequantize(), g.dequantize()) for n, g in expected.items())
    assert not all(torch.equal(without[n].dequantize(), g.dequantize()) for n, g in expected.items())


@pytest.mark.parametrize(
    "document",
    [{}, {"kind": "probe"}, {"kind": "calibration", "exponents": {"a": [1]}},
     {"kind": "calibration", "exponents": {"a": [1, 0.5]}}, {"kind": "calibration", "exponents": {"a": [1, 300]}}],
)  # fmt: skip
def test_a_damaged_calibration_is_refused(document: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"calibration\.json"):
        read_factors(tmp_path)


def test_factors_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_factors(tmp_path)
    with pytest.raises(UsageError, match="lm_head"):
        apply_factors(scaled(build("bert-mlm")[0]), {"lm_head": EdgeFactors()})


def test_calibration_refuses_what_it_cannot_measure() -> None:
    plain, batch = build("bert-mlm")
    with pytest.raises(UsageError, match="unit"):
        calibrate(plain, [batch])
    with pytest.raises(UsageError, match="batch"):
        calibrate(scaled(plain), [])


def test_a_calibrated_operand_keeps_an_outlier_that_a_static_scale_would_clip(tmp_path: Path) -> None:
    plain, batch = build("llama", "sdpa")
    mlp = plain.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[3] *= 200
        mlp.up_proj.weight[3] = mlp.gate_proj.weight[3]
    _, exact = loss_and_grads(plain, batch)
    name = "model.layers.0.mlp.down_proj.weight"

    def error(factors: dict[str, EdgeFactors]) -> float:
        ours = scaled(copy.deepcopy(plain), compute="fp8", carrier=torch.float32, operand_scale="static")
        apply_factors(ours, factors)
        _, found = loss_and_grads(ours, batch)
        clipped[bool(factors)] = fallbacks(ours).get("activation saturated in e4m3fn", 0)
        return float((found[name].dequantize() - exact[name]).norm() / exact[name].norm())

    clipped: dict[bool, int] = {}
    factors = calibrate(scaled(copy.deepcopy(plain)), [batch])
    write_factors(tmp_path, factors)

    assert factors["model.layers.0.mlp.down_proj"].input > 1
    assert read_factors(tmp_path) == factors
    assert error(factors) < error({})
    assert clipped == {False: clipped[False], True: 0}
    assert clipped[False] > 0


def test_an_output_with_outliers_gets_room_for_them_and_a_gradient_does_not() -> None:
    """Queries, keys and values are operands as they are, without a scale of their own under "static"."""
    outlier = [_Magnitudes(rms=1.5, amax=4000.0), _Magnitudes(rms=1.0, amax=2.0)]
    assert _scale_of(outlier, "forward") == 32.0
    assert 4000 / _scale_of(outlier, "forward") < 448 / 2
    assert _scale_of(outlier, "backward") == _scale_of([_Magnitudes(rms=1.2, amax=3.0)], "forward") == 1.0
