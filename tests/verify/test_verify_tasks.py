"""Answers of two models to tasks: paired question by question, as gates, in words, and by lm-eval where installed."""

import importlib.util
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.errors import UnsupportedError
from lpconv.plan.options import ConvertOptions
from lpconv.report.verify import task_text
from lpconv.results import GapEstimate, TaskCheck
from lpconv.student import estimate_share
from lpconv.verify.options import VerifyOptions
from lpconv.verify.tasks import check_tasks, compare_answers

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


def results(values: Sequence[Any], *, score: float | None = None, higher: bool | None = True) -> dict[str, Any]:
    """lm-eval's results for one metric with the given value of each question."""
    samples = [
        {"doc_id": i, "filter": "none", "metrics": ["acc"], "prompt_hash": str(i), "acc": v}
        for i, v in enumerate(values)
    ]
    mean = sum(values) / len(values) if score is None else score
    return {
        "samples": {"quiz": samples},
        "results": {"quiz": {"acc,none": mean, "acc_stderr,none": "N/A"}},
        "higher_is_better": {"quiz": {"acc": higher}},
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> TaskCheck:
    (check,) = compare_answers(before, after)
    return check


def test_questions_are_paired_whatever_their_order() -> None:
    before, after = results([1, 1, 1, 0] * 10), results([1, 0, 1, 1] * 10)
    after["samples"]["quiz"].reverse()
    check = compared(before, after)
    assert (check.num_questions, check.num_lost, check.num_won) == (40, 10, 10)
    assert (check.source_score, check.score) == (0.75, 0.75)
    assert check.drop == estimate_share(10, 10, 40)


def test_pairs_that_differ_alike_have_a_narrow_interval() -> None:
    """Each model's own score is uncertain by 0.3, the difference by nothing."""
    before, after = results([0.1, 0.5, 0.9, 0.3]), results([0.0, 0.4, 0.8, 0.2])
    check = compared(before, after)
    assert check.num_lost is None
    assert check.drop is not None
    assert check.drop.value == pytest.approx(0.1)
    assert check.drop.high - check.drop.low < 1e-9


def test_more_of_a_loss_is_a_drop() -> None:
    check = compared(results([2.0, 3.0], higher=False), results([2.5, 3.5], higher=False))
    assert check.drop is not None
    assert check.drop.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "score"),
    [
        ([-1.0, -2.0], 4.48),  # a perplexity: the exponential of a mean
        ([(0, 1), (1, 1)], 0.5),  # F1 of all pairs of answer and truth
    ],
)
def test_a_score_that_is_no_mean_has_no_interval(values: list[Any], score: float) -> None:
    check = compared(results(values, score=score), results(values, score=score))
    assert (check.drop, check.score) == (None, score)


def test_each_filter_is_a_score_of_its_own() -> None:
    before = results([1, 0])
    for s in list(before["samples"]["quiz"]):
        before["samples"]["quiz"].append({**s, "filter": "strict", "acc": 0})
    before["results"]["quiz"]["acc,strict"] = 0.0
    assert [(c.metric, c.source_score) for c in compare_answers(before, before)] == [("acc", 0.5), ("acc,strict", 0.0)]


def a_check(value: float, half: float, **fields: Any) -> TaskCheck:
    drop = GapEstimate(value=value, low=value - half, high=value + half, count=400)
    known: dict[str, Any] = {"task": "quiz", "metric": "acc", "num_questions": 400, "score": 0.5, "source_score": 0.512}
    return TaskCheck(**known | {"drop": drop, "num_lost": 8, "num_won": 3} | fields)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (a_check(0.012, 0.008), r"loses 1\.2 \(0\.4 to 2\.0\) points .*quiz \(acc, 400 "),
        (a_check(-0.012, 0.008), r"gains 1\.2 \(0\.4 to 2\.0\) points .*quiz \(acc, 400 "),
        (a_check(0.003, 0.008), r"no .*quiz .* 400 .*\(acc: -0\.3 \(-1\.1 to \+0\.5\) points\)"),
        (a_check(0.0, 0.005), r"no .*quiz .* 400 .*\(acc: \+0\.0 \(-0\.5 to \+0\.5\) points\)"),
        (a_check(0.02, 0.01, num_lost=None), r"loses 0\.02 \(0\.01 to 0\.03\) .*quiz \(acc, 400 "),
        (a_check(0, 0, drop=None, num_lost=None, score=4.5), r"acc .*quiz .* 4\.5, .* 0\.512 .*\(400 "),
    ],
)
def test_what_is_said_of_a_score(check: TaskCheck, text: str) -> None:
    assert re.match(text, task_text(check))


def test_lm_eval_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as caught:
        check_tasks(VerifyOptions(against="demo", tasks=("arc_easy",)))
    assert "lpconv[eval]" in (caught.value.hint or "")


TASK = r"""
task: next_line
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
num_fewshot: 2
doc_to_text: "{{question}}\n"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
fewshot_split: test
metric_list: [{metric: acc}]
"""


def quiz(folder: Path) -> Path:
    """A task of 40 questions: which of four lines follows two lines of a play?"""
    lines = [line.strip() for line in demo_text("heldout").read_text().splitlines() if len(line.split()) > 5]
    rng, file = random.Random(0), folder / "items.jsonl"
    with file.open("w") as out:
        for at in range(10, 130, 3):
            choices = [*rng.sample(lines, 3), lines[at]]
            rng.shuffle(choices)
            item = {"question": "\n".join(lines[at - 2 : at]), "choices": choices, "label": choices.index(lines[at])}
            out.write(json.dumps(item) + "\n")
    path = folder / "next_line.yaml"
    path.write_text(TASK.replace("FILE", str(file)))
    return path


@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed")
@pytest.mark.filterwarnings("ignore")  # lm-eval's and those of its packages
def test_lm_eval_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both scores are those that lm-eval alone finds."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task, out = quiz(tmp_path), tmp_path / "out"
    convert(
        "demo", out, ConvertOptions(format="int4", granularity="group:128", layout="compressed-tensors", verify="none")
    )
    words = ["verify", str(out), "--against", "demo", "--level", "weights", "--tasks", str(task), "--json"]
    done = CliRunner().invoke(app, [*words, "--gate", "task:next_line:acc_drop_high<=1"])
    assert done.exit_code == 0, done.output
    (check,) = json.loads(done.stdout)["tasks"]
    assert check["num_questions"] == 40
    assert check["drop"]["value"] == pytest.approx((check["num_lost"] - check["num_won"]) / 40)
    assert check["num_lost"] + check["num_won"] > 0
    alone = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(demo_checkpoint()), "dtype": "float32", "device": "cpu"},
        tasks=[str(task)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert check["source_score"] == pytest.approx(alone["results"]["next_line"]["acc,none"])


@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed")
@pytest.mark.filterwarnings("ignore")
def test_unknown_tasks_and_scores_are_refused_before_the_weights_are_compared(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    quiz(tmp_path / "tasks")
    words = ["verify", "demo", "--against", "demo", "--tasks", f"{tmp_path}/tasks"]
    done = CliRunner().invoke(app, [*words, "--gate", "task:next_line:ac_drop<=1"])
    assert done.exit_code == 2
    assert "`task:next_line:acc_drop`" in done.stderr
