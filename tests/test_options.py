"""One field is one option: on the command line, in a manifest, in its schema, and checked in Python."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from annotated_types import Ge, Lt
from typer.testing import CliRunner

from lpconv.advise.options import AdviseOptions
from lpconv.batch.reading import read_setting, schema_of
from lpconv.bench.options import BenchOptions
from lpconv.cli.command import with_options
from lpconv.errors import UsageError
from lpconv.options import (
    Group,
    Option,
    check,
    check_value,
    command_words,
    fields_of_run,
    fields_that_may_change,
    make,
    option,
    options_of,
    size_option,
)
from lpconv.plan.options import ConvertOptions
from lpconv.probe.options import ProbeOptions
from lpconv.train.options import ArithmeticOptions, FinetuneOptions


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Options of a group."""

    turns: int = option(3, "Number of rounds", Ge(1))


@dataclass(frozen=True, kw_only=True)
class Toy:
    """An option of every shape; some are declared by the annotation, as in commands."""

    patience: int | None = option(None, "Number of evaluations to wait", Ge(1), default="for ever")
    colour: str = option("red", "Colour of the toy", choices=("red", "blue"), short=("-c",))
    rate: float = option(0.5, "Share of the steps", Ge(0), Lt(1))
    sizes: tuple[int, ...] = option((1, 2), "Sizes", Ge(1), name="size", comma=True)
    tags: tuple[str, ...] = option((), "Word to add", flag="tag")
    memory: int | None = option(None, size_option("Bound of the memory"))
    data: Annotated[Path | None, Option("File of data", parse=Path, is_path=True)] = None
    loud: Annotated[bool, Option("Say more", of_run=True)] = False
    goals: Annotated[tuple[str, ...], Option("What it must meet", flag="goal", judges=True)] = ()
    careful: Annotated[bool, Option("Look twice")] = True
    pace: Pace = option(Pace(), Group(Pace, lambda asked: dataclasses.replace(asked, turns=2 * asked.turns)))
    hidden: int = 7


# What a command line gives, the same in a manifest (texts stand for numbers, as in YAML), and the record both make.
GIVEN: list[tuple[list[str], dict[str, Any], Toy]] = [
    ([], {}, Toy(pace=Pace(turns=6))),
    (["--patience", "2"], {"patience": "2"}, Toy(patience=2, pace=Pace(turns=6))),
    (["-c", "blue", "--rate", "0"], {"colour": "blue", "rate": "0"}, Toy(colour="blue", rate=0, pace=Pace(turns=6))),
    (["--size", "3,4"], {"size": [3, "4"]}, Toy(sizes=(3, 4), pace=Pace(turns=6))),
    (["--size", "3"], {"size": 3}, Toy(sizes=(3,), pace=Pace(turns=6))),
    (["--tag", "a", "--tag", "b"], {"tags": ["a", "b"]}, Toy(tags=("a", "b"), pace=Pace(turns=6))),
    (["--memory", "4KB"], {"memory": "4KB"}, Toy(memory=4000, pace=Pace(turns=6))),
    (["--data", "x/y"], {"data": "x/y"}, Toy(data=Path("x/y"), pace=Pace(turns=6))),
    (["--loud", "--no-careful"], {"loud": "yes", "careful": False}, Toy(loud=True, careful=False, pace=Pace(turns=6))),
    (["--turns", "4"], {"turns": 4}, Toy(pace=Pace(turns=8))),
]
OPTIONS = options_of(Toy)


def app(seen: list[Toy]) -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @with_options
    def toy(name: str, options: Toy, quiet: bool = False) -> None:
        check(options)
        seen.append(options)

    return made


@pytest.mark.parametrize(("words", "settings", "record"), GIVEN)
def test_a_command_and_a_manifest_make_the_same_record(words: list[str], settings: dict[str, Any], record: Toy) -> None:
    seen: list[Toy] = []
    done = CliRunner().invoke(app(seen), ["a-name", *words])
    assert done.exit_code == 0, done.output
    read = make(Toy, {name: read_setting(OPTIONS[name], value) for name, value in settings.items()})
    assert seen == [read] == [record]


@pytest.mark.parametrize("record", [record for _, _, record in GIVEN[:-2]], ids=str)
def test_a_record_gives_back_the_words_that_make_it(record: Toy) -> None:
    values = {name: getattr(record, d.field) for name, d in OPTIONS.items() if name != "turns"}
    seen: list[Toy] = []
    assert CliRunner().invoke(app(seen), ["a-name", *command_words(Toy, values)]).exit_code == 0
    assert seen == [record]


def test_what_an_option_decides_is_read_from_its_field() -> None:
    assert fields_of_run(Toy) == {"loud"}
    assert fields_that_may_change(Toy) == {"loud", "goals"}


def test_help_says_what_the_record_says() -> None:
    text = " ".join(CliRunner().invoke(app([]), ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "(default: for" in text
    assert " red, blue." in text
    assert "Repeatable." in text
    assert "--no-careful" in text
    assert "hidden" not in text


def test_the_schema_says_what_the_record_says() -> None:
    colour = schema_of(OPTIONS["colour"])
    assert (colour["enum"], colour["default"]) == (["red", "blue"], "red")
    assert colour["description"].endswith(" red, blue.")
    assert schema_of(OPTIONS["patience"])["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    rate = schema_of(OPTIONS["rate"])
    assert (rate["minimum"], rate["exclusiveMaximum"], rate["default"]) == (0, 1, 0.5)
    one = {"type": "integer", "minimum": 1}
    assert schema_of(OPTIONS["size"])["anyOf"] == [one, {"type": "array", "items": one}]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("patience", 0, " 1, .*`0`"),
        ("patience", "1.5", "number"),
        ("patience", True, "number"),
        ("colour", "bleu", "`bleu`"),
        ("rate", "nan", " 1, .*`nan`"),
        ("rate", 1, " 1"),
        ("size", [1, 0], r"\[1\]: .*number"),
        ("tags", ["", "a"], r"\[0\]: .*text"),
        ("memory", "much", "size `much`"),
        ("loud", "perhaps", "`perhaps`"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(name: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read_setting(OPTIONS[name], value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "wrong", [Toy(patience=0), Toy(colour="green"), Toy(rate=1), Toy(rate=float("nan")), Toy(sizes=(1, 0))], ids=str
)
def test_a_record_made_in_python_is_held_to_the_same(wrong: Toy) -> None:
    with pytest.raises(UsageError):
        check(wrong)


SPELLINGS = ["fp8", "FP8", "fp4", "int4", "Int8", "fp16", "bf16", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize(
    ("record", "name", "names"),
    [
        (ConvertOptions, "format", "e4m3fn e4m3fn e2m1 int4 int8 fp16 bf16 fp16 bf16 e4m3fn"),
        (ConvertOptions, "scheme", "FP8 FP8 NVFP4A16 W4A16 W8A16 UNIT_FP16 COLLAGE UNIT_FP16 COLLAGE FP8"),
        (ArithmeticOptions, "recipe", "unit-fp8 unit-fp8 nvfp4 - - amp-fp16 bf16 amp-fp16 bf16 unit-fp8"),
        (ArithmeticOptions, "precision", "fp8 fp8 fp4 - - fp16 bf16 fp16 bf16 fp8"),
    ],
)
def test_a_format_is_known_by_every_usual_name(record: type[Any], name: str, names: str) -> None:
    declared = options_of(record)[name]
    for typed, meant in zip(SPELLINGS, names.split(), strict=True):
        if meant == "-":  # nothing trains in integers
            with pytest.raises(UsageError):
                check_value(declared, typed)
        else:
            assert check_value(declared, typed) == getattr(make(record, {name: typed}), declared.field) == meant


def test_null_takes_an_option_back_where_it_may_be_none() -> None:
    assert read_setting(OPTIONS["patience"], "null") is None
    with pytest.raises(UsageError):
        read_setting(OPTIONS["rate"], None)


def test_a_text_that_is_no_number_is_refused_with_a_hint() -> None:
    done = CliRunner().invoke(app([]), ["a-name", "--size", "3,x"])
    assert isinstance(done.exception, UsageError)
    assert "number" in done.exception.message


@pytest.mark.parametrize(
    "record", [AdviseOptions, BenchOptions, ConvertOptions, FinetuneOptions, ProbeOptions], ids=lambda r: r.__name__
)
def test_the_example_of_a_hint_is_within_its_bounds(record: type[Any]) -> None:
    for declared in options_of(record).values():
        if declared.bounds:
            check_value(declared, declared.read(declared.hint.split()[-1]))


@pytest.mark.parametrize("record", [ConvertOptions, BenchOptions, ProbeOptions], ids=lambda r: r.__name__)
def test_nobody_both_goes_on_and_starts_anew(record: type[Any]) -> None:
    with pytest.raises(UsageError, match="--force"):
        check(record(resume=True, force=True))
