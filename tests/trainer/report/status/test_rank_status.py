"""What each rank says of itself in output_dir/ranks, and to Prometheus, while it trains."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_trainers import Line, make_trainer, rows, square

from penstock import DistributedDataLoader
from penstock.trainer import Callbacks, TrainerConfig, TrainerConfigError, World
from penstock.trainer.options import build_config
from penstock.trainer.report.memory import measure_gpu
from penstock.trainer.report.pages.run_log import read_run
from penstock.trainer.report.pages.summary import describe_state
from penstock.trainer.report.prometheus import Prometheus, list_rank_numbers
from penstock.trainer.report.status.rank_status import RankStatus, Silence, parse_status, read_ranks, status_path
from penstock.trainer.report.status.timelines import ask_for_timeline, take_parts, withdraw


class Each(Callbacks):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self.call = call

    def on_step(self, record: Any) -> None:
        self.call(record.step)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": torch.linspace(0, 1, 64).numpy()}), tmp_path / "rows.parquet", row_group_size=16)
    return tmp_path / "rows.parquet"


def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x = batch["x"].float()
    return model(torch.stack([x, x], 1)).square().sum(), len(x)


def wait_for(found: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)
    return result


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def make_status(rank: int = 0, world_size: int = 1, **values: Any) -> RankStatus:
    start = {"host": "a", "pid": 7, "device": "cpu", "time": 100.0, "every_s": 1.0, "began_s": 1.0}
    return RankStatus(rank=rank, world_size=world_size, **{**start, **values})


@pytest.mark.slow
def test_a_rank_tells_of_itself_while_it_trains_and_how_it_ended(world: World, tmp_path: Path, table: Path) -> None:
    seen: list[RankStatus] = []

    def look(step: int) -> None:
        if step == 8:  # the thread writes while the loop waits here
            seen.extend(wait_for(lambda: [one for one in read_ranks(tmp_path) if one.step >= 7 and one.steps]))

    with DistributedDataLoader(table, batch_size=4, rank=0, world_size=1) as loader:
        options = {"report": {"status_s": 0.1, "every": 4}, "epochs": 1, "steps": None, "observers": [Each(look)]}
        with make_trainer(world, str(tmp_path), loader, Line(), loss=loss, **options) as trainer:
            trainer.train()
            assert wait_for(lambda: [one for one in read_ranks(tmp_path) if one.state == "idle"])
        (last,) = read_ranks(tmp_path)
        assert loader.metrics().batches == last.loader["batches"] == 16
    (first,) = seen
    assert (first.state, first.rank, first.world_size, first.host) == ("training", 0, 1, socket.gethostname())
    assert first.seconds["forward"] > 0
    assert first.samples_per_s is not None
    assert first.samples_per_s > 0
    assert first.memory["host_memory_bytes"] > 1 << 20
    assert first.recent["batches"] <= first.loader["batches"]
    assert "ready_batches" in first.loader_levels
    assert (last.state, last.step, last.error) == ("ended", 16, "")
    trained = records(tmp_path, "train")
    assert all(one["loader_bottleneck"] for one in trained)
    assert sum(one["loader_fetched_bytes"] for one in trained) <= loader.metrics().fetched_bytes
    assert "disk_read_bytes_per_s" in trained[-1] or not first.traffic
    assert "skew_s" not in trained[-1]  # alone, there is nobody to differ from


def test_a_run_that_raises_says_why_and_other_loaders_tell_less(world: World, tmp_path: Path) -> None:
    def fail(model: Any, batch: Any) -> Any:
        raise ValueError("the labels are missing")

    with (
        pytest.raises(ValueError, match="labels"),
        make_trainer(world, str(tmp_path), rows(world), Line(), loss=fail, steps=3) as trainer,
    ):
        trainer.train()
    (status,) = read_ranks(tmp_path)
    assert (status.state, status.error) == ("failed", "ValueError: the labels are missing")
    assert (status.samples_per_s, status.loader, status.bottleneck) == (None, {}, "")
    assert [one["error"] for one in records(tmp_path, "failure")] == ["ValueError: the labels are missing"]
    assert not records(tmp_path, "end")
    told = describe_state(read_run(tmp_path / "metrics.jsonl"), time.time())
    assert told == "The run failed after step 0 of 3: ValueError: the labels are missing. Nothing was saved."


@pytest.mark.parametrize(("every_steps", "resumes_at"), [(100, 3), (0, None)])
def test_a_run_that_a_signal_stops_says_which_and_where_a_new_start_goes_on(
    world: World, tmp_path: Path, every_steps: int, resumes_at: int | None
) -> None:
    def stop(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    options: dict[str, Any] = {"checkpoint": {"every_steps": every_steps}, "observers": [Each(stop)], "steps": 8}
    with make_trainer(world, str(tmp_path), rows(world), Line(), loss=loss, **options) as trainer:
        assert trainer.train().stopped_early
    (status,) = read_ranks(tmp_path)
    assert (status.state, status.stopped_by, status.resumes_at, status.step) == ("stopped", "SIGINT", resumes_at, 3)
    (end,) = records(tmp_path, "end")
    assert (end["stopped_by"], end["resumes_at"], end["step"]) == ("SIGINT", resumes_at, 3)
    assert [one["note"] for one in records(tmp_path, "note")] == ["stopping after this step: SIGINT"]
    then = "nothing is saved" if resumes_at is None else "resumes at step 3"
    told = describe_state(read_run(tmp_path / "metrics.jsonl"), time.time())
    assert told.startswith("Stopped by SIGINT after step 3 of 8, at ")
    assert told.endswith(f"; {then}.")


def test_without_statuses_nothing_is_written_and_a_folder_that_cannot_be_is_no_error(
    world: World, tmp_path: Path
) -> None:
    with make_trainer(
        world, str(tmp_path / "off"), rows(world), Line(), loss=square, steps=2, report={"status_s": None}
    ) as trainer:
        trainer.train()
    assert not (tmp_path / "off" / "ranks").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "ranks").write_text("a file in its place")
    with make_trainer(world, str(tmp_path / "full"), rows(world), Line(), loss=square, steps=2) as trainer:
        assert trainer.train().steps == 2
    with pytest.raises(TrainerConfigError, match=r"report\.status_s=0\.01"):
        build_config(TrainerConfig, {"steps": 1, "report": {"status_s": 0.01}})


def test_what_an_earlier_start_on_more_ranks_left_is_not_shown(world: World, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(3):
        status_path(tmp_path, rank).write_text(make_status(rank, 3).to_text())
    with make_trainer(world, str(tmp_path), rows(world), Line(), loss=square, steps=1) as trainer:
        trainer.train()
    assert [(one.rank, one.world_size) for one in read_ranks(tmp_path)] == [(0, 1)]
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["rank-00000.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"version": 2}', '{"version": 1}', '{"version": 1, "rank": "0"}', "\x00\xff", "[" * 100_000],
)
def test_a_damaged_status_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "ranks").mkdir()
    status_path(tmp_path, 1).write_text(text)
    status_path(tmp_path, 0).write_text(make_status(0, 2).to_text())
    assert [one.rank for one in read_ranks(tmp_path)] == [0]
    known = json.loads(make_status().to_text())
    for name in ("rank", "time", "seconds", "loader", "host", "phase"):
        assert parse_status(json.dumps({**known, name: None})) is None
    assert parse_status(json.dumps({**known, "seconds": {"fetch": "long"}})) is None
    assert parse_status(json.dumps({**known, "of_a_later_release": 1})) == make_status()
    for name, value in [("world_size", 1 << 70), ("step", 0.5), ("window_s", math.nan), ("memory", {"x": math.inf})]:
        assert parse_status(json.dumps({**known, name: value})) is None
    for name, value in [("total_steps", "9"), ("samples_per_s", {}), ("loader_levels", 3), ("device", None)]:
        assert parse_status(json.dumps({**known, name: value})) is None


def test_a_rank_whose_loader_mixes_thousands_of_sources_is_seen(tmp_path: Path) -> None:
    sources = {f"language-{number:04d}": {"samples": number, "epochs": number / 7} for number in range(3000)}
    told = replace(make_status(), loader={"sources": sources}, recent={"sources": sources})
    (tmp_path / "ranks").mkdir()
    status_path(tmp_path, told.rank).write_text(told.to_text())
    assert read_ranks(tmp_path) == [told]


@pytest.mark.slow
def test_prometheus_serves_the_run_and_its_ranks_on_this_machine_alone(
    world: World, tmp_path: Path, table: Path, unused_tcp_port: int
) -> None:
    pages: list[str] = []

    def scrape(step: int) -> None:
        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics", timeout=20) as answer:
                return str(answer.read().decode())

        if step == 8:
            pages.append(wait_for(lambda: text if "penstock_rank_phase_share" in (text := read()) else ""))
            with socket.socket() as other, pytest.raises(OSError, match="refused"):
                other.connect(("127.0.0.2", unused_tcp_port))  # another address of this machine

    report = {"status_s": 0.1, "every": 2, "prometheus_port": unused_tcp_port}
    with DistributedDataLoader(table, batch_size=4, rank=0, world_size=1) as loader:
        options = {"report": report, "epochs": 1, "steps": None, "observers": [Each(scrape)]}
        with make_trainer(world, str(tmp_path), loader, Line(), loss=loss, **options) as trainer:
            trainer.train()
    (page,) = pages
    host = socket.gethostname()
    assert "penstock_train_loss " in page
    assert f'penstock_rank_state{{host="{host}",rank="0",state="training"}} 1.0' in page
    assert f'penstock_loader_samples_total{{host="{host}",rank="0"}}' in page
    assert "# TYPE penstock_loader_ready_batches gauge" in page
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics", timeout=20)


def test_a_port_in_use_and_an_address_of_nobody_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Prometheus(0)
    port = urlsplit(first.url).port
    assert port
    try:
        with pytest.raises(TrainerConfigError, match=rf"prometheus_port={port} cannot .*in use.*a free port"):
            Prometheus(port)
        monkeypatch.setenv("PENSTOCK_METRICS_TOKEN", "token-of-the-tests")
        with pytest.raises(TrainerConfigError, match=r"prometheus_address=203\.0\.113\.9 .*Cannot assign"):
            Prometheus(0, "203.0.113.9")
    finally:
        first.close()


def test_numbers_of_a_gpu_and_of_the_host_are_served_with_their_units() -> None:
    status = make_status(gpu={"utilisation": 0.5, "power_w": 300.0}, traffic={"disk_read_bytes_per_s": 2.0})
    found = {one.name: one.value for one in list_rank_numbers(status)}
    assert found["penstock_rank_gpu_utilisation"] == 0.5
    assert found["penstock_rank_gpu_power_w"] == 300.0
    assert found["penstock_rank_disk_read_bytes_per_second"] == 2.0


def test_silence_is_told_by_the_readers_own_clock_once_it_has_seen_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"monotonic": 50.0, "time": 1000.0}
    monkeypatch.setattr(time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(time, "time", lambda: now["time"])
    silence = Silence()

    def see(sequence: int, written_s: float, began_s: float = 1.0) -> float:
        return silence.note([make_status(sequence=sequence, time=written_s, began_s=began_s)])[0]

    assert see(1, 990.0) == 10.0
    now.update(monotonic=53.0, time=0.0)  # the clock on the wall may jump
    assert see(1, 990.0) == 13.0
    assert see(2, 2000.0) == 0.0  # another host's clock
    now["monotonic"] = 60.0
    assert see(2, 2000.0) == 7.0
    assert see(1, 2000.0, began_s=5.0) == 0.0  # it was started again


def test_a_device_tells_its_utilisation_and_power_where_its_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "utilization", lambda asked: 42 if asked == device else 0)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda asked: 312_500)  # milliwatts
    assert measure_gpu(device) == {"utilisation": pytest.approx(0.42), "power_w": pytest.approx(312.5)}
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert measure_gpu(device) == {"power_w": pytest.approx(312.5)}
    assert measure_gpu(torch.device("cpu")) == {}


@pytest.mark.slow
def test_a_timeline_is_recorded_when_it_is_asked_for_and_once(world: World, tmp_path: Path, table: Path) -> None:
    answers: list[Any] = []

    def ask(step: int) -> None:
        if step == 4:
            answers.append(ask_for_timeline(tmp_path, 0.3))
            wait_for(lambda: trainer.stopwatch.timeline)
        if step == 12:
            answers.append(wait_for(lambda: take_parts(tmp_path, answers[0])))
            assert trainer.stopwatch.timeline is None
            withdraw(tmp_path, answers[0])

    with DistributedDataLoader(table, batch_size=4, rank=0, world_size=1, transform=dict) as loader:
        options = {"report": {"status_s": 0.1}, "epochs": 1, "steps": None, "observers": [Each(ask)]}
        with make_trainer(world, str(tmp_path), loader, Line(), loss=loss, **options) as trainer:
            trainer.train()
    names = {event["name"] for event in answers[1][0] if event["ph"] == "X"}
    assert names >= {"fetch", "forward", "backward", "optimizer", "consumer wait"}
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["rank-00000.json"]
