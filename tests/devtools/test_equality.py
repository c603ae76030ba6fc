"""A few of the combinations that ``python -m devtools equality`` compares, and that it finds differences."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_ranks

from devtools import equality
from devtools.equality import Combination, Found, compare
from penstock.trainer import World, close_world, open_world

FEW = [
    Combination(model="lm", ranks=2, accumulate=4, zero=0),
    Combination(model="lm", ranks=3, accumulate=2, zero=2),
    Combination(model="resnet", ranks=3, accumulate=2, zero=0),
    Combination(model="resnet", ranks=2, accumulate=4, zero=1),
    Combination(model="embeddings", ranks=2, accumulate=2, zero=0),
    Combination(model="embeddings", ranks=3, accumulate=1, zero=3),
    Combination(model="lm", ranks=2, accumulate=3, zero=0, layout="tp=2"),
    Combination(model="untied", ranks=2, accumulate=1, zero=3, layout="tp=2"),
    Combination(model="encoder", ranks=2, accumulate=3, zero=2, layout="cp=2"),
]


def compare_few(world: World, folder: str) -> list[list[str]]:
    mine = [one for one in FEW if one.ranks == world.world_size]
    return [compare(one, world, f"{folder}/{number}").wrong for number, one in enumerate(mine)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_weights_buffers_modes_and_generators_are_those_of_one_process_and_survive_a_resume(
    tmp_path: Path, ranks: int
) -> None:
    found = run_ranks(compare_few, ranks, str(tmp_path), timeout_s=150)[0]
    assert len(found) == {2: 6, 3: 3}[ranks]
    assert found == [[]] * len(found)


@pytest.mark.slow
def test_whatever_differs_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = equality.train_naively

    def train_wrongly(*arguments: Any, **keywords: Any) -> Any:
        found = right(*arguments, **keywords)
        return replace(
            found,
            weights={name: one + 1e-3 for name, one in found.weights.items()},
            buffers=[{name: one + 1 for name, one in own.items()} for own in found.buffers],
            modes=[{name: not mode for name, mode in own.items()} for own in found.modes],
            generators=[{**own, "numpy": "other"} for own in found.generators],
        )

    monkeypatch.setattr(equality, "train_naively", train_wrongly)
    world = open_world(device="cpu")
    try:
        wrong = compare(Combination(model="resnet", ranks=1, accumulate=1, zero=0), world, str(tmp_path)).wrong
    finally:
        close_world()
    for what in ("weights differ", "buffers differ", "modes of modules differ", "numpy's generator differ"):
        assert sum(what in text for text in wrong) == 2, (what, wrong)  # in fp32 and in fp64
    assert not any("resume" in text for text in wrong)


def test_what_was_found_is_read_again_but_for_what_was_wrong(tmp_path: Path) -> None:
    exact = {"fp32": 0.0, "fp64": 0.0}
    rows = [
        (one, Found(weights=exact, buffers=exact, wrong=["weights differ"] if one is FEW[0] else [])) for one in FEW
    ]
    equality.write_results(tmp_path / "equality.json", rows, 12.0, len(rows))
    assert equality.read_results(tmp_path / "equality.json") == (rows[1:], 12.0)
    assert equality.read_results(tmp_path / "none.json") == ([], 0.0)


@pytest.mark.parametrize(("layout", "ranks"), [("ep=2", 2), ("ep=2,tp=2", 4), ("ep=2,cp=2", 4)])
def test_experts_lie_on_replicas(layout: str, ranks: int) -> None:
    one = Combination(model="mixture", ranks=ranks, accumulate=1, zero=0, layout=layout)
    assert (one.replicas, equality.can_run(one)) == (2, True)
    assert not equality.can_run(replace(one, ranks=ranks // 2))
    assert not equality.can_run(replace(one, model="llama"))


@pytest.mark.full
def test_the_command_tells_and_keeps_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "devtools.equality", "--models", "embeddings", "--ranks", "2"]
    command += ["--zero", "3", "--accumulate", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 combinations in" in done.stdout
    assert "0 of them wrong" in done.stdout
    kept = json.loads((tmp_path / "equality.json").read_text())
    assert kept["rows"][0]["wrong"] == []
    assert kept["rows"][0]["weights"]["fp64"] <= kept["bounds"]["fp64"]
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert "1 combinations in" in again.stdout
    assert "embeddings" not in again.stdout  # it was not trained once more
