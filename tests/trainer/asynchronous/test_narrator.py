"""Records of a run over servers are of what happened since the last, also once its coordinator has started anew."""

from __future__ import annotations

import json
from pathlib import Path

from served_runs import recipe_of

from penstock.trainer.asynchronous.narrator import Narrator, View
from penstock.trainer.server.services import DataPlan


def view(step: int, batches: float) -> View:
    """A look at a run whose worker has trained on so many batches of 4 rows, each with a loss of 0.5."""
    numbers = {"batches_sum": batches, "rows_sum": 4 * batches, "loss_sum": 2 * batches, "count_sum": 4 * batches}
    return View(
        step=step, consumed=step, epoch=0, evaluated=0, metrics={}, evaluations={}, numbers={"worker-000": numbers}
    )


def test_sums_that_begin_at_zero_again_are_added_to_what_was_told(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, trainer={"report": {"quiet": True, "every": 10}})
    plan = DataPlan(batches=100, units=100, rows=4, span=1, workers=1)
    with Narrator(recipe, plan) as narrator:
        for step, batches in ((10, 10), (15, 15), (16, 1), (20, 5), (30, 15)):  # the coordinator died after 15
            narrator.follow(view(step, batches))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in records if one["kind"] == "train"]
    assert [one["step"] for one in trained] == [10, 20, 30]
    assert [one["loss"] for one in trained] == [0.5, 0.5, 0.5]
    rows = [one["samples_per_s"] * one["seconds"] for one in trained]
    assert [round(one) for one in rows] == [40, 40, 40]
