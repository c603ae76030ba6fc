"""What a loader's state comes back as: exactly what it was, or it is refused by its place at the first save."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows

from penstock.trainer import CheckpointError, World


class Remembering:
    """A loader of rows that has something more in its state."""

    def __init__(self, world: World, more: Any) -> None:
        self._rows, self.more = rows(world), more

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Any:
        return iter(self._rows)

    @property
    def epoch(self) -> int:
        return self._rows.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows.state_dict(), "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state["rows"])
        self.more = state["more"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"shards": {3: 7}}, r"\['more'\]\['shards'\] has the key 3 \(int\), which would come back as text"),
        ([1, {"at": {None: 1}}], r"\['more'\]\[1\]\['at'\] has the key None \(NoneType\)"),
        (random.Random(1).getstate(), r"\['more'\] is a tuple, which would come back as a list"),
        ({"order": [[1, (2, 3)]]}, r"\['more'\]\['order'\]\[0\]\[1\] is a tuple"),
        ({"at": np.int64(3)}, r"\['more'\]\['at'\] is of type int64"),
        ({"generator": torch.zeros(2)}, r"\['more'\]\['generator'\] is of type Tensor"),
        ({"seen": {1, 2}}, r"\['more'\]\['seen'\] is of type set"),
    ],
    ids=["key", "deep key", "tuple", "deep tuple", "number of numpy", "tensor", "set"],
)
def test_a_state_that_would_come_back_otherwise_is_refused_by_its_place(
    world: World, tmp_path: Path, more: Any, told: str
) -> None:
    with make_trainer(world, str(tmp_path), Remembering(world, more), checkpoint={"every_steps": 2}) as trainer:
        with pytest.raises(
            CheckpointError, match=rf"extra\['feed'\]\['loader'\]{told}.*Use mappings with text as keys"
        ):
            trainer.train()
        assert trainer.progress.step == 2


@pytest.mark.slow
def test_a_plain_state_comes_back_as_it_was(world: World, tmp_path: Path) -> None:
    more = {
        "text": "é",
        "numbers": [1, 2**80, -0.0, 0.1, math.inf],
        "flags": [True, False, None],
        "deep": [[], {"": {}}],
    }
    with make_trainer(world, str(tmp_path), Remembering(world, more), steps=2, checkpoint={"every_steps": 2}) as first:
        first.train()
    loader = Remembering(world, None)
    with make_trainer(world, str(tmp_path), loader, checkpoint={"every_steps": 2}) as second:
        assert second.progress.step == 2
        assert repr(loader.more) == repr(more)
    loader = Remembering(world, math.nan)
    with make_trainer(world, str(tmp_path / "nan"), loader, checkpoint={"every_steps": 2}) as trainer:
        trainer.train()
    with make_trainer(world, str(tmp_path / "nan"), loader := Remembering(world, 0), checkpoint={"every_steps": 2}):
        assert math.isnan(loader.more)


def save_states_of_ranks(world: World, folder: str) -> str:
    more = {world.rank: 1} if world.rank else {}
    with make_trainer(world, folder, Remembering(world, more), checkpoint={"every_steps": 2}) as trainer:
        with pytest.raises(CheckpointError) as caught:
            trainer.train()
        return str(caught.value)


def test_a_state_of_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    for told in run_ranks(save_states_of_ranks, 2, str(tmp_path)):
        assert "extra['feed']['ranks'][1]['loader']['more'] has the key 1" in told
