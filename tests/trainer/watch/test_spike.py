"""What counts as a loss spike."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer import SpikeConfig, TrainerConfigError
from penstock.trainer.watch.spike import Spike, SpikeWatch

FLAT = [2.0, 2.01, 1.99, 2.0, 2.02, 1.98, 2.0, 2.01]


def feed(watch: SpikeWatch, losses: list[float], start: int = 0) -> list[Spike]:
    found = [watch.add(step, loss) for step, loss in enumerate(losses, start=start)]
    return [spike for spike in found if spike is not None]


def test_a_loss_far_above_the_window_is_a_spike_and_says_how_far() -> None:
    watch = SpikeWatch(SpikeConfig(window=8))
    assert feed(watch, [*FLAT, 2.05]) == []
    (spike,) = feed(watch, [9.0], start=9)
    assert (spike.first, spike.last) == (9, 9)
    assert "step 9: the loss 9 is above 2.0" in spike.problem
    assert "6 deviations over the median of 8 steps" in spike.problem


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert feed(SpikeWatch(SpikeConfig(window=8)), [1.0, 2.0, 900.0, 1.0, 1.0, 1.0, 1.0]) == []


def test_falling_losses_and_losses_that_do_not_scatter_are_calm() -> None:
    assert feed(SpikeWatch(SpikeConfig(window=8)), [10.0 * 0.97**step for step in range(200)]) == []
    assert feed(SpikeWatch(SpikeConfig(window=8)), [2.0] * 20 + [2.01] * 20) == []
    assert feed(SpikeWatch(SpikeConfig(window=8)), [0.0] * 20 + [0.1] * 20) == []


def test_a_spike_is_as_many_suspicious_steps_in_a_row_as_patience_says() -> None:
    watch = SpikeWatch(SpikeConfig(window=8, patience=2))
    assert feed(watch, [*FLAT, 9.0]) == []
    assert watch.is_undecided
    assert feed(watch, [2.0, 9.0], start=9) == []
    (spike,) = feed(watch, [8.0, 9.0], start=11)
    assert (spike.first, spike.last) == (10, 11)
    assert not watch.is_undecided


def test_a_level_that_stays_is_told_once_and_becomes_normal() -> None:
    watch = SpikeWatch(SpikeConfig(window=8))
    assert len(feed(watch, [*FLAT, *[5.0 + 0.01 * (step % 3) for step in range(30)]])) == 1
    assert len(feed(watch, [20.0])) == 1


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=60), st.integers(0, 59))
def test_a_watch_continued_from_its_state_judges_as_one_that_went_on(losses: list[float], cut: int) -> None:
    config = SpikeConfig(window=8, patience=2, threshold=3.0)
    whole, before, after = SpikeWatch(config), SpikeWatch(config), SpikeWatch(config)
    expected = feed(whole, losses)
    found = feed(before, losses[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert found + feed(after, losses[cut:], start=min(cut, len(losses))) == expected
    assert after.state_dict() == whole.state_dict()
    assert all(math.isfinite(loss) for loss in after.state_dict()["losses"])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"window": 3}, "spike.window"),
        ({"threshold": 0.0}, "spike.threshold"),
        ({"patience": 9, "window": 32}, "spike.patience=9 is more than a quarter"),
        ({"on_spike": "panic"}, "spike.on_spike"),
        ({"max_rewinds": 0}, "spike.max_rewinds"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], key: str) -> None:
    with pytest.raises(TrainerConfigError, match=key.replace(".", r"\.")):
        SpikeConfig(**options)  # type: ignore[arg-type]
