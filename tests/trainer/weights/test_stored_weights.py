"""Weights of a run in an object store are exported and started from as those of a run in a folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file
from small_trainers import make_trainer, rows
from test_warm_start import begin, refuse
from tied_model import Scaled, Tied

from penstock.cli import run as run_command
from penstock.storage import MemoryStore
from penstock.trainer import CheckpointError, Evaluation, World, export_run
from penstock.trainer.checkpoint.remote import upload
from penstock.trainer.checkpoint.remote.layout import read_stored


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    monkeypatch.setattr(upload, "PART_BYTES", 300)
    store = MemoryStore(f"mem://{uuid4().hex}/run").create()
    yield store
    store.drop()


@pytest.fixture(autouse=True)
def staging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where checkpoints are fetched to: empty again after every test."""
    folder = tmp_path_factory.mktemp("s")  # short: sockets of processes that tests start lie below it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("penstock-checkpoint-*"))


def train_into(world: World, output: Path, folder: str) -> None:
    """Four steps with averages; the third is the best."""
    torch.manual_seed(1)
    scores = iter([0.1, 0.2, 0.9, 0.3])

    def score(model: Any, batch: Any) -> Any:
        model(batch["x"])
        return {"accuracy": (next(scores), 1)}

    evaluation = Evaluation(batches=[next(iter(rows(world)))], metrics=score)
    saves = {"every_steps": 1, "keep_last": 4, "keep_best": 1, "folder": folder}
    options = {"evaluate": {"every": 1, "best": "accuracy"}, "checkpoint": saves, "ema": {"decay": 0.5}}
    with make_trainer(
        world, str(output), rows(world, "drop"), Tied(Scaled), evaluation=evaluation, **options
    ) as trainer:
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{}, {"step": "best"}, {"step": 2}, {"weights": "ema"}], ids=str)
def test_an_export_from_a_store_is_that_from_a_folder(
    world: World, bucket: MemoryStore, tmp_path: Path, choice: Any
) -> None:
    train_into(world, tmp_path / "local", "checkpoints")
    train_into(world, tmp_path / "remote", bucket.url)
    (tmp_path / "local" / "config.json").write_text('{"a": 1}')
    bucket.put("config.json", b'{"a": 1}')
    wanted = export_run(tmp_path / "local", tmp_path / "one", format="hf", **choice)
    told: list[int] = []
    found = export_run(bucket.url, tmp_path / "two", format="hf", advance=told.append, **choice)
    assert (found.step, found.files, found.numbers) == (wanted.step, wanted.files, wanted.numbers)
    assert found.checkpoint == f"{bucket.url}/step-{wanted.step}"
    assert sum(told) > wanted.numbers * 4
    one, two = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(two[name], value) for name, value in one.items())
    assert (tmp_path / "two" / "config.json").read_bytes() == b'{"a": 1}'


@pytest.mark.slow
def test_the_command_exports_one_step_by_its_url(
    world: World, bucket: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_into(world, tmp_path / "remote", bucket.url)
    flags = ["--output", str(tmp_path / "out"), "--json"]
    assert run_command(["export", f"{bucket.url}/step-2", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert load_file(tmp_path / "out" / "model.safetensors")
    assert run_command(["export", f"{bucket.url}/step-2", "--step", "3", *flags]) != 0
    assert "is one checkpoint" in capsys.readouterr().err


def begin_from(world: World, folder: str, places: list[str], zero: int) -> Any:
    return [begin(world, f"{folder}/{number}", place, zero) for number, place in enumerate(places)]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_starts_with_the_weights_of_one_in_a_store(
    world: World, bucket: MemoryStore, tmp_path: Path, zero: int
) -> None:
    train_into(world, tmp_path / "local", "checkpoints")
    train_into(world, tmp_path / "remote", bucket.url)
    for info in bucket.list():  # to where processes can share it
        copy = tmp_path / "store" / info.key
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(bucket.get(info.key))
    url = f"local://{tmp_path}/store"
    places = [str(tmp_path / "local"), url, f"{url}/step-4"]
    results = [begin_from(world, str(tmp_path / "alone"), places, zero)]
    results += run_ranks(begin_from, 2, str(tmp_path / "two"), places, zero)
    for local, *stored in results:
        for one in stored:
            assert all((one[0][name] == value).all() for name, value in local[0].items())
            assert one[1:] == local[1:]


@pytest.mark.slow
def test_what_is_damaged_missing_or_no_run_is_refused(world: World, bucket: MemoryStore, tmp_path: Path) -> None:
    empty = f"mem://{uuid4().hex}/nothing"
    other = MemoryStore(empty).create()
    assert "holds no checkpoint" in refuse(world, tmp_path, empty)
    other.drop()
    train_into(world, tmp_path / "remote", bucket.url)
    assert "has no checkpoint of step 9; there are those of steps 1, 2, 3, 4" in refuse(
        world, tmp_path, bucket.url, warm_start={"step": 9}
    )
    stored = read_stored(bucket, 4)
    parts = [part for name in stored.parts if name.startswith("__") for part in stored.parts_of(name)]
    for part in parts:
        data = bytearray(bucket.get(part.key))
        data[-1] ^= 1
        bucket.put(part.key, bytes(data))
    assert "is damaged" in refuse(world, tmp_path, bucket.url)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_run(bucket.url, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    bucket.delete([parts[0].key])
    assert f"{parts[0].key} is missing" in refuse(world, tmp_path, bucket.url)
