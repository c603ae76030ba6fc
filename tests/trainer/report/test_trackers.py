"""Weights & Biases and MLflow, as installed, without a network."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_trainers import make_trainer

from penstock.trainer import TrainerConfigError, TrainerError, World
from penstock.trainer.report.trackers import InBackground, WandB


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def train(world: World, folder: Path, steps: int, **report: Any) -> None:
    options = {"quiet": True, "every": 1, **report}
    with make_trainer(world, str(folder), steps=steps, checkpoint={"every_steps": 2}, report=options) as trainer:
        trainer.train()


def read_offline(path: Path) -> list[Any]:
    """The records of a small offline run, once W&B's own process has written the last."""
    deadline_s = time.monotonic() + 60
    while True:
        records = list(parse_offline(path)) if path.stat().st_size else []
        if records and records[-1].HasField("exit"):
            return records
        assert time.monotonic() < deadline_s, "W&B wrote no end"
        time.sleep(0.05)


def parse_offline(path: Path) -> Iterator[Any]:
    """LevelDB's log format, in one block, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    assert len(data) < 32768, "one block"
    at = 7
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            break
        assert kind == 1, "a whole record"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        yield record
        at += 7 + length


@pytest.mark.slow
def test_wandb_gets_the_records_of_a_run_and_of_its_restart_as_one(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, 2, wandb="penstock-test")
    train(world, tmp_path, 4, wandb="penstock-test")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # one id
    steps = []
    for path in files:
        for record in read_offline(path):
            if record.HasField("history"):
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                if "train/loss" in row:
                    steps.append(int(row["step"]))
                    assert float(row["train/loss"]) > 0
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_mlflow_gets_the_records_of_a_run_and_of_its_restart_as_one(world: World, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    train(world, tmp_path, 2, mlflow="penstock-test")
    train(world, tmp_path, 4, mlflow="penstock-test")
    client = MlflowClient()
    found = client.get_experiment_by_name("penstock-test")
    [run] = client.search_runs([found.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["penstock.world_size"] == "1"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [*(one for one in sys.modules if one.partition(".")[0] == name), name, f"{name}.entities"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TrainerConfigError, match=rf"install penstock\[{name}\]"):
        train(world, tmp_path, 1, **{name: "project"})


def test_an_id_that_a_full_disk_left_empty_or_did_not_take_is_made_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(*, id: str, **options: Any) -> Any:  # noqa: A002 - W&B's name
        begun.append(id)
        return SimpleNamespace(define_metric=lambda *names, **steps: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=begin))
    path = tmp_path / "wandb-run-id"
    path.touch()
    for _ in range(2):
        WandB("project", tmp_path).close()
    assert begun == [path.read_text()] * 2
    assert begun[0]

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path.unlink()
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        with pytest.raises(TrainerConfigError, match="No space left"):
            WandB("project", tmp_path)
    assert list(tmp_path.iterdir()) == []


class Slow:
    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.got: list[int] = []
        self.closed = False

    def record(self, kind: str, step: int, values: Any) -> None:
        assert self.may_go.wait(60)
        self.got.append(step)
        if kind == "end":
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        self.closed = True


def test_a_slow_server_keeps_nobody_waiting_and_its_error_comes_later() -> None:
    slow = Slow()
    observer = InBackground(slow)
    for step in range(10):
        observer.record("train", step, {})
    slow.may_go.set()
    observer.record("end", 10, {})
    with pytest.raises(ConnectionError, match="the server is gone"):
        observer.close()
    assert slow.got == list(range(11))
    assert slow.closed
    with pytest.raises(ConnectionError):
        observer.record("train", 11, {})


def test_a_tracker_that_exits_is_an_error_of_the_next_record() -> None:
    exited = threading.Event()

    class Exiting:
        def record(self, kind: str, step: int, values: Any) -> None:
            raise SystemExit(1)

        def close(self) -> None:
            exited.set()

    observer = InBackground(Exiting())
    observer.record("step", 1, {})
    assert exited.wait(60)
    with pytest.raises(TrainerError, match=r"Exiting ended with SystemExit\(1\)"):
        observer.record("step", 2, {})
