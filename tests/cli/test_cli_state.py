"""``penstock state``: what a saved state says, moved on as a running loader would move, and refused where damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import DistributedDataLoader, Subset, pack
from penstock.cli import run
from penstock.loader.order.costs.steps import EvenSteps, skip_steps
from penstock.loader.order.state import LoaderState
from penstock.tools.state_file import skip_in_state


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    pack([{"__key__": f"{n:03d}", "n": n} for n in range(100)], str(folder), shard_bytes=2000, progress=False)
    return str(folder)


@pytest.fixture(scope="module")
def state(data: str) -> dict[str, Any]:
    with DistributedDataLoader(data, batch_size=8) as loader:
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        return loader.state_dict()


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "loader.json"
    path.write_text(json.dumps({"step": 2, "loader": state}, indent=2))
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run(["state", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_show_says_where_a_state_stands(capsys, saved, data):
    code, out, _ = call(capsys, "show", saved)
    assert code == 0
    assert f"{saved}, at loader" in " ".join(out.split())
    assert "16 of the epoch's 100 samples (16.0%)" in out
    assert "shuffled, seed 0; 16 lanes" in out
    code, out, _ = call(capsys, "show", saved, "--json")
    told = json.loads(out)
    assert (code, told["consumed"], told["epoch_samples"]) == (0, 16, 100)
    with DistributedDataLoader(data, batch_size=8, subset=Subset.share(0, 0.5)) as loader:
        saved.write_text(json.dumps(loader.state_dict()))
        out = call(capsys, "show", saved)[1]
        assert f"0 of the epoch's {len(loader.dataset)} samples" in out
        assert "Subset.share(0.0, 0.5, seed=0)" in out


def test_skip_moves_a_state_to_where_skip_batches_moves_a_loader(capsys, saved, data):
    state = json.loads(saved.read_text())["loader"]
    for count in (0, 3, 10, 11, 40):
        saved.write_text(json.dumps({"step": 2, "ranks": [{"loader": state}, {"loader": state}]}))
        code, _, err = call(capsys, "skip", saved, "--batches", count, "--global-batch-size", 8)
        assert (code, err) == (0, "")
        with DistributedDataLoader(data, batch_size=8) as loader:
            loader.load_state_dict(state)
            loader.skip_batches(count)
            expected = {"step": 2, "ranks": [{"loader": loader.state_dict()}] * 2}
        assert json.loads(saved.read_text()) == expected


@given(
    st.integers(1, 60), st.integers(0, 60), st.integers(1, 12), st.integers(0, 50), st.sampled_from(["drop", "partial"])
)
def test_skipping_batches_by_arithmetic_is_skipping_them_one_by_one(total, consumed, size, count, last_batch):
    state = LoaderState(
        fingerprint="f",
        num_samples=total,
        seed=0,
        shuffle=True,
        lanes=1,
        window=1,
        epoch=3,
        consumed=min(consumed, total),
    )
    steps = EvenSteps(total, size, last_batch)
    if not steps.count(0):
        return
    at = (3, state.consumed) if steps.count(state.consumed) else (4, 0)
    moved = skip_in_state(state, batches=count, size=size, last_batch=last_batch)
    if steps.count(moved.consumed):  # else it is written as the epoch's end, which loaders read as the next's beginning
        assert (moved.epoch, moved.consumed) == skip_steps(*at, count, lambda _: steps)
    else:
        assert count == 0


def test_skip_by_samples_goes_on_in_the_next_epoch_and_back_in_its_own(capsys, saved):
    for samples, at in ((90, (1, 6)), (-6, (1, 0)), (250, (3, 50))):
        code, _, _ = call(capsys, "skip", saved, "--samples", samples)
        state = json.loads(saved.read_text())["loader"]
        assert (code, state["epoch"], state["consumed"]) == (0, *at)
    before = saved.read_text()
    code, out, _ = call(capsys, "skip", saved, "--samples", 1, "--dry-run", "--json")
    assert (code, json.loads(out)["after"]["consumed"], saved.read_text()) == (0, 51, before)
    code, _, err = call(capsys, "skip", saved, "--samples", -51)
    assert code == 2
    assert "before the beginning of epoch 3" in err
    assert saved.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--batches N with --global-batch-size G, or --samples N"),
        (("--batches", 3), "go together"),
        (("--batches", 3, "--samples", 3, "--global-batch-size", 1), "give one of them"),
        (("--batches", 3, "--global-batch-size", 101), "no batch"),
        (("--batches", 3, "--global-batch-size", 0), "at least 1"),
        (("--samples", 1 << 70), "beyond any run"),
    ],
)
def test_skips_that_cannot_be_change_nothing(capsys, saved, arguments, problem):
    before = saved.read_text()
    code, _, err = call(capsys, "skip", saved, *arguments)
    assert code == 2
    assert problem in err
    assert saved.read_text() == before


def test_files_without_one_whole_state_are_refused(capsys, saved, tmp_path):
    state = json.loads(saved.read_text())["loader"]
    contents: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "holds no state of a loader"),
        (json.dumps({"loader": {"version": 5, "consumed": 8, "mixture": {}}}), "the state of a mixture"),
        (json.dumps({**state, "consumed": 101}), "damaged"),
        (json.dumps({**state, "consumed": state["consumed"] + 1}), "checksum"),
        (json.dumps({**state, "lanes": "16"}), "lanes of the wrong type"),
        (json.dumps({**state, "version": 99}), "version 99"),
        (json.dumps([state, {**state, "consumed": 3}]), "2 different states of loaders, at 0, 1"),
    ]
    for text, problem in contents:
        saved.write_text(text)
        for command in (("show", saved), ("skip", saved, "--samples", 1)):
            code, _, err = call(capsys, *command)
            assert (code, problem in err) == (2, True), err
            assert saved.read_text() == text
    assert call(capsys, "show", tmp_path / "absent")[0] == 2
    assert call(capsys, "shwo")[2].startswith("penstock state: no command 'shwo'; did you mean 'show'?")


def test_a_checkpoint_of_the_trainer_is_shown_and_not_edited(capsys, saved, tmp_path):
    folder = tmp_path / "step-2"
    folder.mkdir()
    (folder / "extra.json").write_text(saved.read_text())
    (folder / "manifest.json").write_text("{}")
    assert "16 of the epoch's 100 samples" in call(capsys, "show", folder)[1]
    for path in (folder, folder / "extra.json"):
        code, _, err = call(capsys, "skip", path, "--samples", 1)
        assert code == 2
        assert "skip_batches" in err
    assert (folder / "extra.json").read_text() == saved.read_text()
