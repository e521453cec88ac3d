"""`convert --calibrate`: scales of inputs in the file, from a text that the source runs on."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import lpconv
from lpconv.cli.main import app
from lpconv.convert import run as run_module
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import LpconvError, OutputExistsError
from lpconv.inspect.headers import inspect
from lpconv.inspect.values import judge_scales
from lpconv.layouts.compressed_tensors import Compressed, CompressedTiles
from lpconv.layouts.reader import StoredTensors
from lpconv.models.tokenizer import read_tokenizer, tokenize
from lpconv.plan import memory
from lpconv.plan.options import CALIBRATION_TOKENS, ConvertOptions, parse_rule
from lpconv.storage import remote
from lpconv.storage.remote import UNFINISHED
from tests.helpers.checkpoints import files_of
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import tiny, with_demo_tokenizer
from tests.helpers.object_store import Fault, Request, Store
from tests.helpers.stores import offered

NVFP4: dict[str, Any] = {"format": "e2m1", "granularity": "nvfp4"}
FP8: dict[str, Any] = {"format": "e4m3fn"}
MIXED = {**NVFP4, "rules": (parse_rule("*self_attn*=e4m3fn"),)}
ASKED = {"NVFP4": NVFP4, "FP8": FP8, "mixed": MIXED}
BUCKET = "s3://bucket"
SCALES = (".input_scale", ".input_global_scale")
HEAD = "lm_head"


def source(folder: Path, **changed: Any) -> Path:
    """A Llama of one layer with a head of its own and the tokenizer of the demo."""
    words = json.loads((demo_checkpoint() / "config.json").read_text())["vocab_size"]
    settings = {
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": words,
        "max_position_embeddings": 48, "tie_word_embeddings": False,
    }  # fmt: skip
    return with_demo_tokenizer(tiny("llama", folder, **settings | changed))


def text(folder: Path, words: str = "To be, or not to be, that is the question:\n") -> Path:
    path = folder / "text.txt"
    path.write_text(words * 20)
    return path


def calibrate_to(output: Path | str, model: Path | str, data: Path | str, **asked: Any) -> None:
    given = {"layout": "compressed-tensors", "verify": "weights", "calibrate": str(data), **asked}
    convert(str(model), output, ConvertOptions(**given))


def calibrated(model: Path, output: Path, data: Path | str, **asked: Any) -> Path:
    calibrate_to(output, model, data, **asked)
    return output


def scales_of(path: Path) -> dict[str, torch.Tensor]:
    return {n: x for n, x in load_file(path / "model.safetensors").items() if n.endswith(SCALES)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("calibrated") / "plain")


@pytest.fixture(scope="module")
def made(plain: Path) -> dict[str, Path]:
    """Calibrated in every way, on the same text."""
    data = text(plain.parent)
    return {name: calibrated(plain, plain.parent / name, data, **asked) for name, asked in ASKED.items()}


@pytest.mark.parametrize("with_head", [False, True])
def test_scales_are_those_of_the_largest_inputs(tmp_path: Path, *, with_head: bool) -> None:
    """Of a plain run of transformers on the same windows; with a head that is quantised, too."""
    model_path, data = source(tmp_path / "plain"), text(tmp_path)
    head: dict[str, Any] = {"rules": (parse_rule(f"{HEAD}.weight=e4m3fn"),)} if with_head else {}
    nvfp4 = calibrated(model_path, tmp_path / "nvfp4", data, scale="exact", **NVFP4)
    fp8 = calibrated(model_path, tmp_path / "fp8", data, scale="exact", **FP8, **head)
    model = transformers.LlamaForCausalLM.from_pretrained(model_path)
    seen: dict[str, float] = {}

    def note(name: str) -> Any:
        return lambda _, args: seen.update({name: max(seen.get(name, 0.0), float(args[0].abs().max()))})

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(note(name))
    windows = tokenize(data, read_tokenizer(model_path), seq_len=48, vocab_size=model.config.vocab_size).windows
    with torch.no_grad():
        model(input_ids=windows[: CALIBRATION_TOKENS // 48])
    assert {n.rpartition(".")[0] for n in scales_of(nvfp4)} == seen.keys() - {HEAD}
    assert {n.rpartition(".")[0] for n in scales_of(fp8)} == seen.keys() - (set() if with_head else {HEAD})
    for path, formula in ((nvfp4, lambda x: 448.0 * 6.0 / x), (fp8, lambda x: x / 448.0)):
        for name, scale in scales_of(path).items():
            assert scale.shape == (1,)
            assert scale.dtype == torch.float32
            assert float(scale) == pytest.approx(formula(seen[name.rpartition(".")[0]]), rel=1e-5)


def test_weights_that_readers_fuse_share_scales(made: dict[str, Path]) -> None:
    """Of inputs, because these are the same; of the weights by construction."""
    for name, path in made.items():
        state = load_file(path / "model.safetensors")
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            shared = {
                leaf: {float(x) for n, x in state.items() if n.split(".")[-2] in group and n.endswith(leaf)}
                for leaf in (*SCALES, ".weight_global_scale")
            }
            assert all(len(found) <= 1 for found in shared.values()), name
            assert any(shared[leaf] for leaf in SCALES), name
        told = judge_scales(inspect(path), path)
        assert (told.problems, told.warnings) == ((), ())


def test_scales_are_powers_of_two_that_hold_every_input(made: dict[str, Path]) -> None:
    for name, path in made.items():
        seen = json.loads((path / "lpconv.json").read_text())["calibration"]["absmax"]
        for key, scale in scales_of(path).items():
            module, _, leaf = key.rpartition(".")
            largest = seen[module] * float(scale) / 6 if leaf == "input_global_scale" else seen[module] / float(scale)
            assert math.frexp(float(scale))[0] == 0.5, name
            assert 224.0 <= largest <= 448.0, "the largest scale of a group, or code"


@pytest.mark.parametrize("name", ["NVFP4", "FP8"])
def test_the_config_is_the_package_s_preset(name: str, made: dict[str, Path]) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    written = json.loads((made[name] / "config.json").read_text())["quantization_config"]
    scheme, known = (
        QuantizationConfig.model_validate(written).config_groups["group_0"],
        preset_name_to_scheme(name, ["Linear"]),
    )
    assert scheme.weights.model_dump(exclude={"observer"}) == known.weights.model_dump(exclude={"observer"})
    assert scheme.input_activations.model_dump() == known.input_activations.model_dump()
    state = load_file(made[name] / "model.safetensors")
    with StoredTensors.open(made[name]) as stored:
        coded = {n: form for n, form in stored.forms.items() if form.format is not None}
        assert len(coded) == 7
        for weight, form in coded.items():
            assert isinstance(form, Compressed | CompressedTiles)
            assert form.has_input_scale
            stem = weight.removesuffix("weight")
            parts = {n.removeprefix(stem): x for n, x in state.items() if n.startswith(stem)}
            theirs = BaseCompressor.get_value_from_registry(written["format"]).decompress(parts, scheme)["weight"]
            assert torch.equal(stored.tensor(weight).to(theirs.dtype), theirs)


def test_plain_transformers_opens_them_and_rounds_inputs(made: dict[str, Path]) -> None:
    found = opens_elsewhere(*made.values(), dtype="bfloat16")
    for path, (logits, num_codes, weights) in zip(made.values(), found, strict=True):
        ours = lpconv.load(path, dtype=torch.bfloat16)
        assert num_codes == 7
        assert all(torch.equal(x, ours.get_parameter(n)) for n, x in weights.items() if n.endswith("proj.weight"))
        with torch.inference_mode():
            wanted = ours(input_ids=torch.arange(3, 35).view(2, 16)).logits
        assert torch.isfinite(logits).all()
        assert not torch.equal(logits, wanted), "inputs were rounded"


def test_weights_are_those_of_a_conversion_without(made: dict[str, Path], plain: Path, tmp_path: Path) -> None:
    """The same tensors, and the scales of inputs beside them."""
    convert(str(plain), tmp_path / "a16", ConvertOptions(layout="compressed-tensors", verify="none", **NVFP4))
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "a16", made["NVFP4"]))
    assert {n for n in after if not n.endswith(SCALES)} == before.keys()
    assert all(torch.equal(x.view(torch.uint8), after[n].view(torch.uint8)) for n, x in before.items())


def test_a_run_that_resumes_does_not_calibrate_again(
    made: dict[str, Path], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the scales of the first one, and only with the same text."""
    data = shutil.copyfile(plain.parent / "text.txt", tmp_path / "text.txt")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_write_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            calibrated(plain, tmp_path / "out", data, **NVFP4)
    monkeypatch.setattr("lpconv.verify.calibrate.calibrate", killed)
    data.write_text("Something else entirely, and long enough to be read.\n" * 9)
    with pytest.raises(OutputExistsError, match="calibration"):
        calibrated(plain, tmp_path / "out", data, resume=True, **NVFP4)
    shutil.copyfile(plain.parent / "text.txt", data)
    calibrated(plain, tmp_path / "out", data, resume=True, **NVFP4)
    assert files_of(tmp_path / "out") == files_of(made["NVFP4"])
    again = calibrated(plain, tmp_path / "out", data, resume=True, **NVFP4)  # finished: nothing to do
    data.write_text("Something else.\n" * 9)
    with pytest.raises(OutputExistsError, match="calibration"):
        calibrated(plain, again, data, resume=True, **NVFP4)


def convert_demo(out: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, words), "--layout", "compressed-tensors", "-o", str(out)])


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        (["--format", "e4m3fn", "--granularity", "row"], 2, "leave --calibrate out"),
        (["--format", "e4m3fn", "--granularity", "128x128"], 2, "leave --calibrate out"),
        (["--format", "e4m3fn", "--granularity", "mx"], 2, "leave --calibrate out"),
        (["--format", "e2m1", "--granularity", "mx"], 2, "--rounding gptaq"),
        (["--format", "int4", "--granularity", "group:32"], 2, "--rounding gptaq"),
        (["--format", "e4m3fn", "--layout", "lpconv"], 2, "--rounding gptaq"),
        (["--format", "e4m3fn", "--shard", "1/2"], 2, "--calibrate"),
        (["--format", "e4m3fn", "--finish"], 2, "--calibrate"),
        (["--format", "e4m3fn", "--calibrate", "nothing.txt"], 3, "`nothing.txt`"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_the_work(
    tmp_path: Path, options: list[str], code: int, hint: str
) -> None:
    arguments = ["convert", "demo", "--layout", "compressed-tensors", "--calibrate", "demo", *options]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert done.exit_code == code, done.stderr
    assert hint in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["short", "bytes", "tokenizer", "vit", "nan"])
def test_a_text_that_says_nothing_publishes_nothing(what: str, plain: Path, tmp_path: Path) -> None:
    model, data, code, said = plain, text(tmp_path), 3, ""
    if what == "short":
        data.write_text("To be.")
        said = "text.txt` has 6 tokens"
    elif what == "bytes":
        data.write_bytes(b"\xff\xfe\x00")
        said = "not UTF-8"
    elif what == "tokenizer":
        model, said = tiny("llama", tmp_path / "bare"), "`bare`"
    elif what == "vit":
        model, code, said = tiny("vit", tmp_path / "vit"), 4, "`ViTForImageClassification`"
    else:
        model = source(tmp_path / "nan")
        state = load_file(model / "model.safetensors")
        state["model.embed_tokens.weight"][:] = torch.nan
        save_file(state, model / "model.safetensors", metadata={"format": "pt"})
        said = "q_proj` are NaN"
    done = convert_demo(tmp_path / "out", model, "--format", "e4m3fn", "--calibrate", data)
    assert done.exit_code == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_a_module_that_the_text_never_reaches_is_named(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept as it is, it stands in `ignore`, and the rest is calibrated."""
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(mlp, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))))
    asked = (plain, "--format", "e2m1", "--granularity", "nvfp4", "--calibrate", text(tmp_path), "--verify", "none")
    done = convert_demo(tmp_path / "out", *asked)
    assert done.exit_code == 4
    assert "`model.layers.0.mlp.up_proj`" in " ".join(done.stderr.split())
    assert "--exclude 'model.layers.0.mlp.*'" in " ".join(done.stderr.split())
    done = convert_demo(tmp_path / "out", *asked, "--exclude", "re:(gate|up)_proj")
    assert done.exit_code == 0, done.stderr
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", HEAD]


def test_a_source_with_such_a_name_is_refused(plain: Path, tmp_path: Path) -> None:
    """The file would hold two tensors of one name."""
    shutil.copytree(plain, tmp_path / "taken")
    state = load_file(plain / "model.safetensors") | {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    save_file(state, tmp_path / "taken/model.safetensors", metadata={"format": "pt"})
    done = convert_demo(tmp_path / "out", tmp_path / "taken", "--format", "e4m3fn", "--calibrate", "demo")
    assert done.exit_code == 4
    assert "`model.layers.0.mlp.up_proj.input_scale`" in " ".join(done.stderr.split())


def test_memory_that_is_too_little_is_refused_before_the_work(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations are counted in addition to the memory of the conversion."""
    monkeypatch.setattr(memory, "_CALIBRATING_BYTES", 2**50)
    asked = ("--format", "e4m3fn", "--verify", "none")
    assert convert_demo(tmp_path / "out", plain, *asked).exit_code == 0
    done = convert_demo(tmp_path / "calibrated", plain, *asked, "--calibrate", text(tmp_path))
    assert done.exit_code == 7
    assert re.search(r"needs \d+ MB .* \d+ MB", " ".join(done.stderr.split()))
    assert not (tmp_path / "calibrated.partial").exists()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "_RETRIES", remote._RETRIES | {"max_retries": 2})
    with offered(monkeypatch, tmp_path) as store:
        yield store


def sums_of(store: Store, name: str) -> str:
    return store.objects[f"{name}/SHA256SUMS"].decode()


def test_outputs_in_an_object_store_are_the_local_ones(made: dict[str, Path], plain: Path, store: Store) -> None:
    """Of a source that lies there, too; and `verify` reads both there."""
    for name, content in files_of(plain).items():
        store.objects[f"plain/{name}"] = content
    for name, model in (("out", str(plain)), ("again", f"{BUCKET}/plain")):
        calibrate_to(f"{BUCKET}/{name}", model, plain.parent / "text.txt", **NVFP4)
        assert store.objects[f"{name}/model.safetensors"] == (made["NVFP4"] / "model.safetensors").read_bytes()
        assert " text.txt" in store.objects[f"{name}/README.md"].decode()
        done = CliRunner().invoke(app, ["verify", f"{BUCKET}/{name}", "--against", model, "--level", "weights"])
        assert done.exit_code == 0, done.stderr
    assert sums_of(store, "out") == (made["NVFP4"] / "SHA256SUMS").read_text()
    assert not any(UNFINISHED in key for key in store.objects)


@pytest.mark.parametrize("moment", range(0, 12, 2))
def test_a_run_to_an_object_store_goes_on_with_its_calibration(
    made: dict[str, Path], plain: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """On another machine as well, which has nothing of it."""
    data, left = plain.parent / "text.txt", [moment]

    def breaks(r: Request) -> Fault | None:
        left[0] -= r.method != "GET"
        return Fault(status=400) if left[0] < 0 else None

    store.fault = breaks
    with pytest.raises(LpconvError):
        calibrate_to(f"{BUCKET}/out", plain, data, **NVFP4)
    store.fault = lambda _: None
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    is_calibrated = f"out/{UNFINISHED}calibration.json" in store.objects
    if is_calibrated:
        monkeypatch.setattr("lpconv.verify.calibrate.calibrate", None)  # called, it ends the run
    calibrate_to(f"{BUCKET}/out", plain, data, resume=True, **NVFP4)
    assert sums_of(store, "out") == (made["NVFP4"] / "SHA256SUMS").read_text()
    assert is_calibrated or moment < 4
