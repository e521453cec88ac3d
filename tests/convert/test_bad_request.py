"""Requests that are wrong, gates that fail, and what the command line says to the worst of them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import UsageError, VerificationError
from lpconv.options import parse_size
from lpconv.plan.options import ConvertOptions, FormatRule, parse_rule
from tests.helpers.checkpoints import DEMO_TENSORS, Run, files_of, published, refusal, write_checkpoint


class TestRequest:
    """Options that are wrong: exit code 2, before anything is read."""

    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            ({"method": "collage", "format": "e5m2"}, "writes bf16, fp16"),
            ({"method": "collage", "residual": "exact61"}, "`exact16`"),
            ({"residual": "bf16"}, "collage"),
            ({"scale": "pow3"}, "`pow2`"),
            ({"verify": "everything"}, "logits"),
            ({"gates": ("sqrn>=3",)}, "`sqnr`"),
            ({"gates": ("sqnr>=high",)}, "--gate"),
            ({"include": ("re:[",)}, "escape"),
            ({"exclude": ("re:(?P<1>x)",)}, "escape"),
            ({"exclude": ("re:a{99999999999}",)}, "escape"),
            ({"include": ("re:" + "(" * 5000,)}, "escape"),
            ({"rules": (FormatRule(pattern="re:*", format="keep"),)}, "escape"),
            ({"rules": (FormatRule(pattern="*", format="tf32"),)}, "fp32, fp16, bf16, e4m3fn, e5m2"),
            ({"method": "collage", "rules": (FormatRule(pattern="*", format="fp16"),)}, "=keep"),
            ({"resume": True, "force": True}, "start"),
            ({"revision": "main"}, "leave --revision out"),
            ({"include": ("layer.wieght",)}, "layer.weight"),
            ({"exclude": ("layer.wieght",)}, "layer.weight"),
            ({"include": ("re:wieght$",)}, ""),
            ({"rules": (FormatRule(pattern="layer.wieght", format="keep"),)}, "layer.weight"),
        ],
        ids=str,
    )
    def test_options_that_are_wrong(self, run: Run, output: Path, options: dict[str, Any], hint: str) -> None:
        error = refusal(run, output, **options)
        assert error.exit_code == 2
        assert hint in str(error.hint)
        assert not output.with_name(output.name + ".partial").exists()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"granularity": "column"}, "`column`"),
            ({"granularity": "mx", "format": "fp16"}, " 32 "),
            ({"granularity": "128x128", "format": "e2m1"}, "format `e2m1`"),
            ({"granularity": "group:7"}, "of 8"),
            ({"format": "int4", "granularity": "tensor"}, "int4 with --granularity group:128"),
            ({"format": "e2m1", "granularity": "tensor"}, "e2m1 with --granularity mx"),
            ({"granularity": "mx", "scale": "exact"}, "power-of-two scales"),
            ({"method": "collage", "granularity": "row"}, "`collage`"),
            ({"method": "collage", "points_max": 2}, "`collage`"),
            ({"method": "collage", "budget_bits": 9.0}, "`collage`"),
            ({"method": "multipoint", "granularity": "row"}, "`multipoint`"),
            ({"method": "multipoint", "budget_bits": 4.0}, " 4 bits .* int4"),
            ({"method": "multipoint", "budget_bits": math.nan}, "nan .* int4"),
            ({"method": "multipoint", "format": "int8", "budget_bits": 4.5}, r" 4\.5 bits .* int8"),
            ({"method": "multipoint", "points_max": 0}, "--points-max 0 "),
            ({"method": "multipoint", "points_max": 9}, "--points-max 9 "),
            ({"method": "multipoint", "format": "fp16"}, "format `fp16`"),
            ({"method": "multipoint", "residual": "bf16"}, "residual"),
            ({"method": "multipoint", "rules": (FormatRule(pattern="*", format="int8"),)}, r"`\*=int8`.* int4"),
            ({"rounding": "gptq", "calibrate": "demo", "method": "collage"}, "method `collage`.*residual"),
            ({"rounding": "gptq", "calibrate": "demo", "method": "multipoint"}, "method `multipoint`.*scales"),
            ({"rounding": "gptq", "calibrate": "demo", "format": "fp16"}, "format `fp16`"),
            ({"rounding": "gptq", "format": "int4"}, "gptq.*calibrate"),
            ({"rounding": "nearest", "format": "int4", "calibration_tokens": 512}, "--calibration-tokens"),
            ({"rounding": "nearest", "calibrate": "demo", "calibration_seed": 1}, "--calibration-seed"),
            ({"layout": "compresed-tensors"}, "compressed-tensors"),
            ({"layout": "compressed-tensors", "format": "fp16"}, "--format e4m3fn"),
            ({"layout": "compressed-tensors", "format": "e5m2"}, "--format e4m3fn"),
            ({"layout": "compressed-tensors", "format": "e5m2", "granularity": "mx"}, " e5m2 "),
            ({"layout": "compressed-tensors", "method": "collage"}, "--format e4m3fn"),
            ({"layout": "compressed-tensors", "format": "e4m3fn", "rules": (parse_rule("*=fp16"),)}, "=keep"),
            ({"layout": "transformers", "format": "e4m3fn"}, "`transformers`"),
            ({"layout": "transformers", "format": "e4m3fn", "granularity": "row"}, "unit.*e4m3fn.* row "),
            ({"layout": "transformers", "format": "e2m1", "granularity": "mx"}, " e2m1 "),
            ({"layout": "transformers", "format": "int4", "granularity": "group:32"}, " int4 "),
            ({"layout": "transformers", "method": "collage"}, " collage "),
            ({"layout": "transformers", "format": "e4m3fn", "granularity": "mx", "rules": (parse_rule("*mlp*=e2m1"),)},
             r"`\*mlp\*=e2m1`"),
            ({"layout": "mlx", "format": "e5m2", "granularity": "mx"}, "`mlx`"),
            ({"layout": "mlx", "format": "int4", "granularity": "group:16"}, "`mlx`"),
            ({"layout": "mlx", "format": "e2m1", "granularity": "nvfp4"}, "`mlx`"),
            ({"layout": "mlx", "format": "fp16", "granularity": "row"}, "`mlx`"),
            ({"layout": "gguf", "format": "e4m3fn"}, "`gguf`"),
            ({"layout": "gguf", "format": "int4", "granularity": "group:64"}, "`gguf`"),
            ({"layout": "gguf", "format": "fp16", "granularity": "row"}, "`gguf`"),
            ({"layout": "gguf", "format": "fp16", "max_shard_size": 1000}, "file"),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_a_method_or_a_layout_cannot_hold(
        self, run: Run, output: Path, options: dict[str, Any], words: str
    ) -> None:
        error = refusal(run, output, **options)
        assert error.exit_code == 2
        assert re.search(words, f"{error.message} {error.hint}")

    @pytest.mark.parametrize("text", ["", "=fp16", "x", "x=", "x=fp17"])
    def test_rules_that_are_wrong(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_rule(text)
        assert caught.value.hint

    @pytest.mark.parametrize("text", ["", "0", "0.1", "-1GB", "1PB", "GB", "nan", "inf", "1e9", "9" * 400])
    def test_sizes_that_are_wrong(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_size(text)
        assert caught.value.hint

    def test_a_rule_may_hold_an_equals_sign(self) -> None:
        assert parse_rule("re:a=b=keep") == FormatRule(pattern="re:a=b", format="keep")

    def test_the_first_rule_decides_and_exclude_comes_before(self, run: Run, source: Path) -> None:
        write_checkpoint(source, {n: torch.ones(2, 2) for n in ("a.w", "b.w", "c.w", "d.w")})
        rules = tuple(
            FormatRule(pattern=p, format=f) for p, f in (("a.*", "bf16"), ("re:[ab]", "e5m2"), ("d*", "fp32"))
        )
        result = run(rules=rules, exclude=("d.w",), include=("c.*",))
        assert {t.name: t.format for t in result.tensors} == {
            "a.w": "bf16",
            "b.w": "e5m2",
            "c.w": "fp16",
            "d.w": "fp32",
        }
        assert {t.name: t.action for t in result.tensors}["d.w"] == "keep"

    def test_no_memory_for_one_worker(self, run: Run, output: Path) -> None:
        assert refusal(run, output, max_memory=1000).exit_code == 7

    def test_the_published_command_holds_no_folder_and_makes_the_same_output(
        self, source: Path, tmp_path: Path
    ) -> None:
        write_checkpoint(source, {**DEMO_TENSORS, "x y": torch.ones(2), "a'b": torch.ones(2)})
        given = ConvertOptions(
            format="e5m2",
            include=("layer.*", "re:x y"),
            rules=(FormatRule(pattern="a'b", format="keep"),),
            gates=("sqnr>=1",),
            verify="weights",
            workers=1,
        )
        convert(str(source), tmp_path / "out", given, command=f"lpconv convert {source} -o {tmp_path}/out --resume")
        published = json.loads((tmp_path / "out" / "report.json").read_text())["command"]
        assert str(tmp_path) in published, "report.json is of this run, and says what was typed"
        card = (tmp_path / "out" / "README.md").read_text()
        assert str(tmp_path) not in card
        expected = (
            "lpconv convert source --method unit --format e5m2 --include 'layer.*' "
            "--include 're:x y' --rule 'a'\"'\"'b=keep' --verify weights --gate 'sqnr>=1'"
        )
        assert expected in card


class TestGates:
    @pytest.mark.parametrize("gate", ["sqnr>=500", "sqnr<1", "max_rel_error==0"])
    def test_a_gate_that_fails_keeps_the_output_aside(self, run: Run, output: Path, gate: str) -> None:
        error = refusal(run, output, gates=("sqnr>=1", gate), verify="none")
        assert isinstance(error, VerificationError)
        assert gate in error.message
        kept = output.with_name("output.failed")
        assert str(kept) in str(error.hint)
        assert {"config.json", "model.safetensors", "report.json"} < files_of(kept, without=set()).keys()
        assert not output.with_name("output.partial").exists()

    def test_the_next_run_starts_anew_and_replaces_what_failed(self, run: Run, output: Path) -> None:
        for bound in (500, 600):
            assert f"sqnr>={bound}" in refusal(run, output, gates=(f"sqnr>={bound}",)).message
        run(gates=("sqnr>=1",))
        assert (output / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("convert", "{source}", "-o", "{output}", "--gate", "sqnr>=500"), 5, "output.failed"),
        (("convert", "{source}", "-o", "{source}"), 8, "--output"),
        (("convert", "{source}", "-o", "{output}", "--method", "unti"), 2, "`unit`"),
        (("convert", "{source}/config.json", "-o", "{output}"), 3, "/config.json`"),
        (("convert", "bert-large", "-o", "{output}"), 3, "`hf download google-bert/bert-large-uncased"),
        (("convert", "nobody/no-such-model", "-o", "{output}"), 3, "`hf download nobody/no-such-model"),
        (("convert", "bert-lagre", "-o", "{output}"), 3, "`bert-large`"),
        (("convert", "{source}", "-o", "{output}", "--workers", "0"), 2, "workers"),
        (("verify", "{source}"), 4, "`lpconv convert`"),
        (("restore", "{source}", "-o", "{output}"), 4, "`lpconv convert`"),
        (("verify", "{source}/nowhere"), 3, "nowhere"),
        (("restore", "{source}/nowhere", "-o", "{output}"), 3, "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_command_line_ends_with_the_code_and_a_hint(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], code: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    done = CliRunner().invoke(app, [a.format(source=source, output=output) for a in arguments])
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not published(output)


def test_messages_carry_no_control_characters_to_the_terminal(source: Path, output: Path) -> None:
    shards = [{"a": torch.ones(2, 2)}, {"b": torch.ones(2, 2)}]
    write_checkpoint(source, shards)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"\\u001b]0;owned\\u0007"'))
    done = CliRunner().invoke(app, ["convert", str(source), "-o", str(output)])
    assert done.exit_code == 3
    assert "owned" in done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines())
