"""What the loop tells while it trains: records, scalars, numbers served, and a line for people."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from small_trainers import make_trainer, rows

from penstock.trainer import Evaluation, TrainerConfigError, TrainerError, World
from penstock.trainer.__main__ import main
from penstock.trainer.report.console import ProgressLine, format_times
from penstock.trainer.report.json_lines import JsonLines
from penstock.trainer.report.progress import Pace
from penstock.trainer.report.prometheus import Prometheus


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_appended_as_json_lines_without_nan(tmp_path: Path) -> None:
    for _ in range(2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.record("train", 3, {"loss": float("nan"), "rate": 0.5, "epoch": 1})
        lines.close()
    records = read_records(tmp_path)
    assert len(records) == 2
    assert records[0]["loss"] is None
    assert (records[1]["step"], records[1]["rate"]) == (3, 0.5)


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="output_dir="):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


def test_every_step_is_recorded_with_what_a_person_looks_at(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), report={"every": 3, "quiet": True}, steps=7) as trainer:
        trainer.train()
    records = read_records(tmp_path)
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == [3, 6, 7]
    first = next(record for record in records if record["kind"] == "train")
    assert {"loss", "rate", "samples_per_s", "data_wait_share", "eta_s", "epoch"} <= first.keys()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_is_done_has_not_failed_because_nothing_can_be_printed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with make_trainer(world, str(tmp_path), report={"quiet": False, "every": 1}) as trainer:
        assert trainer.train().steps == 4


def test_an_error_to_fix_keeps_its_exit_code_where_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert main(["no-such-recipe.toml"]) == 2


@pytest.mark.slow
def test_tensorboard_gets_the_scalars(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), report={"tensorboard": True, "quiet": True, "every": 1}) as trainer:
        trainer.train()
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_prometheus_serves_the_newest_numbers_and_frees_its_port(unused_tcp_port: int) -> None:
    for value in (1.5, 2.5):
        served = Prometheus(unused_tcp_port)
        served.record("train", 7, {"loss": value, "eta_s": None})
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        served.close()
        assert f"penstock_train_loss {value}" in text
        assert "penstock_train_step 7.0" in text


@pytest.mark.slow
def test_prometheus_serves_nothing_of_records_before_the_newest_and_any_metrics_name() -> None:
    served = Prometheus(0)
    served.record("train", 7, {"loss": 1.0, "skew_s": 0.5, "slowest_rank": 3})
    served.record("evaluate", 7, {"précision@1": 0.5})
    served.record("train", 8, {"loss": 0.5, "skew_s": 0.0})
    with urllib.request.urlopen(served.url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    served.close()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert {name: value for name, value in found.items() if name.startswith("penstock_train")} == {
        "penstock_train_step": "8.0",
        "penstock_train_loss": "0.5",
        "penstock_train_skew_s": "0.0",
    }
    assert found["penstock_evaluate_pr_cision_1"] == "0.5"


def test_the_time_left_does_not_jump_with_each_evaluation_or_with_the_slow_first_steps() -> None:
    pace, step_s = Pace(), []
    for number in range(1, 401):  # records of ten steps of 1 s; the first waits 60 s, each eighth evaluates for 40 s
        pace.add(10, 10 + 60 * (number == 1) + 40 * (number % 8 == 0))
        step_s.append(pace.seconds_per_step)
    assert step_s[0] == 7
    assert all(one == pytest.approx(1.5, rel=0.1) for one in step_s[80:])
    assert all(one == pytest.approx(1.5, rel=0.5) for one in step_s[8:])
    for _ in range(20_000):
        pace.add(1, 2.0)
    assert pace.seconds_per_step == pytest.approx(2.0)


def test_the_end_tells_the_training_loss_where_a_metric_is_called_loss(world: World, tmp_path: Path) -> None:
    def measure(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": (torch.tensor(700.0), torch.tensor(1.0)), "other": (torch.tensor(8.0), torch.tensor(1.0))}

    options = {"evaluation": Evaluation(batches=rows(world, "pad"), metrics=measure), "report": {"quiet": True}}
    with make_trainer(world, str(tmp_path), steps=4, evaluate={"every": 4}, **options) as trainer:
        summary = trainer.train()
    end = read_records(tmp_path)[-1]
    assert summary.metrics["loss"] == 700.0
    assert (end["kind"], end["loss"], end["other"]) == ("end", summary.loss, 8.0)


@pytest.mark.slow
def test_metrics_are_served_to_this_machine_alone_or_to_those_who_know_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Prometheus(0)
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+/metrics", served.url)
    served.close()
    with pytest.raises(TrainerConfigError, match=r"prometheus_address=0\.0\.0\.0 .* PENSTOCK_METRICS_TOKEN"):
        Prometheus(0, "0.0.0.0")
    monkeypatch.setenv("PENSTOCK_METRICS_TOKEN", "token-of-the-tests")
    served = Prometheus(0, "0.0.0.0")
    url = served.url.replace("0.0.0.0", "127.0.0.1")
    served.record("train", 7, {"loss": 1.5})
    try:
        for given in ({}, {"Authorization": "Bearer token"}, {"Authorization": "token-of-the-tests"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=given), timeout=30)
        right = urllib.request.Request(url, headers={"Authorization": "Bearer token-of-the-tests"})
        with urllib.request.urlopen(right, timeout=30) as answer:
            assert b"penstock_train_loss 1.5" in answer.read()
    finally:
        served.close()


def test_a_port_that_is_taken_is_named() -> None:
    served = Prometheus(0)
    port = urlsplit(served.url).port
    assert port
    with pytest.raises(TrainerConfigError, match=f"report.prometheus_port={port}"):
        Prometheus(port)
    served.close()


def test_the_progress_line_shows_loss_rate_speed_wait_and_time_to_go() -> None:
    stream = io.StringIO()
    line = ProgressLine(every_s=0.0, total_steps=100, stream=stream)
    line.record(
        "train",
        40,
        {"epoch": 2, "loss": 0.125, "rate": 1e-3, "samples_per_s": 512.0, "data_wait_share": 0.034, "eta_s": 3700.0},
    )
    line.record("evaluate", 40, {"accuracy": 0.75})
    line.close()
    first, second = stream.getvalue().splitlines()
    assert first.split("  ") == [
        *("step 40/100", "epoch 2", "loss 0.125", "512 samples/s", "ETA 1:01:40"),
        *("data wait 3%", "learning rate 0.001"),
    ]
    assert second == "step 40  evaluated:  accuracy 0.75"


def test_the_table_of_times_adds_up_to_the_whole() -> None:
    table = format_times({"forward": 2.0, "fetch": 1.0}, 4.0).splitlines()
    assert [line.split()[0] for line in table[2:]] == ["forward", "fetch", "other", "all"]
    assert table[-2].split()[1:] == ["1.00", "25.0%"]
