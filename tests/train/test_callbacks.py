"""When a run is evaluated and saved, and what its time is counted as."""

from types import SimpleNamespace
from typing import Any

import pytest

from lpconv.progress import Silent
from lpconv.train import callbacks
from lpconv.train.callbacks import Timetable
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.trainer import Clock


def saves(monkeypatch: pytest.MonkeyPatch, *, seconds_per_step: float, **options: Any) -> list[int]:
    """The steps after which a run of eight would be saved."""
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    trainer: Any = SimpleNamespace(num_skipped_in_a_row=0, agree=bool)
    asked = FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), steps=8, **options)
    timetable, found = Timetable(asked, trainer), []
    for step in range(1, 9):
        now[0] += seconds_per_step
        state, control = SimpleNamespace(global_step=step, max_steps=8), SimpleNamespace()
        timetable.on_step_end(None, state, control)
        if control.should_save:
            found.append(step)
            timetable.on_save(None, state, control)
    return found


def test_a_short_run_writes_no_checkpoints_and_a_long_one_every_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saves(monkeypatch, seconds_per_step=1) == []
    assert saves(monkeypatch, seconds_per_step=301) == [2, 4, 6]  # never after the last step: the model is published


def test_steps_between_checkpoints_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saves(monkeypatch, seconds_per_step=301, save_every=3) == [3, 6]
    assert saves(monkeypatch, seconds_per_step=3010, save_every=0) == []


def test_the_clock_counts_a_block_that_fails() -> None:
    clock = Clock(Silent())
    with pytest.raises(KeyError), clock.spending("steps"):
        raise KeyError
    clock.add("saves", 2.0)
    clock.add("saves", 1.0)
    assert clock.seconds["steps"] > 0
    assert clock.seconds["saves"] == 3.0
