"""A running job of two ranks, as `penstock top`, a timeline, Prometheus and the Grafana dashboard show it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from free_port import free_port
from launch import start_ranks
from missing_server import skip_or_fail_in_ci

from penstock.cli import run
from penstock.loader.metrics import LoaderMetrics
from penstock.trainer.report.prometheus import list_rank_numbers
from penstock.trainer.report.status.rank_status import RankStatus, read_ranks

DEPLOY = Path(__file__).parents[3] / "deploy"
# Only where there is a CUDA device.
OF_A_GPU = {"penstock_rank_gpu_utilisation", "penstock_rank_device_memory_reserved_bytes"}


@dataclass(frozen=True)
class Job:
    folder: Path
    port: int


def wait_for(found: Callable[[], Any], what: str, patience_s: float = 90.0) -> Any:
    deadline_s = time.monotonic() + patience_s
    while not (result := found()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)
    return result


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two ranks that trains."""
    folder, port = tmp_path_factory.mktemp("job"), free_port()
    (folder / "data").mkdir()
    table = pa.table({"x": torch.linspace(0, 1, 4096).numpy()})
    pq.write_table(table, folder / "data" / "rows.parquet", row_group_size=256)
    program = Path(__file__).with_name("watched_run.py")
    with start_ranks(program, 2, str(folder / "data"), str(folder / "run"), str(port)):
        wait_for(
            lambda: sum(one.steps >= 10 for one in read_ranks(folder / "run")) == 2, "the ranks did not begin to train"
        )
        yield Job(folder / "run", port)


def expressions() -> list[str]:
    """What the dashboard asks Prometheus."""
    panels = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def names_in(texts: list[str]) -> set[str]:
    return set(re.findall(r"\bpenstock_\w+", " ".join(texts)))


def served_names(page: str) -> set[str]:
    return {line.partition("{")[0].split(" ")[0] for line in page.splitlines() if line and not line.startswith("#")}


def read_page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def look(job: Job, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["top", str(job.folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_dashboard_is_whole_and_its_panels_lie_side_by_side() -> None:
    board = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
    assert board["uid"] == "penstock"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    known = {"job", "rank", "datasource", "__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) == known
    # Those of a loader are known without a run, and so are those of a GPU.
    loaders = {f"penstock_loader_{name.removesuffix('_s')}" for name in LoaderMetrics.__dataclass_fields__}
    of_loaders = {name for name in names_in(expressions()) if name.startswith("penstock_loader_")}
    assert {re.sub(r"(_seconds)?(_total)?$", "", name) for name in of_loaders} <= loaders
    memory = {"device_memory_reserved_bytes": 1.0}
    status = RankStatus(
        rank=0, world_size=1, host="a", pid=1, device="cuda", time=0.0, every_s=1.0, began_s=0.0, memory=memory,
        gpu={"utilisation": 1.0},
    )  # fmt: skip
    assert {number.name for number in list_rank_numbers(status)} >= OF_A_GPU


@pytest.mark.slow
def test_every_name_in_the_dashboard_is_served(job: Job) -> None:
    wanted = names_in([(DEPLOY / "grafana" / "penstock.json").read_text()]) - OF_A_GPU
    wait_for(lambda: wanted <= served_names(read_page(job.port)), f"not all of {sorted(wanted)} are served")


@pytest.mark.slow
def test_top_names_the_rank_that_is_slow(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    found = wait_for(lambda: (seen := look(job, capsys))["survey"]["slowest"] is not None and seen, "nobody is slowest")
    assert (found["survey"]["slowest"], found["survey"]["skew_phase"], found["running"]) == (1, "forward", True)
    assert found["survey"]["waits"]["0"] > found["survey"]["waits"]["1"]

    def find_recorded() -> list[Any]:
        lines = (job.folder / "metrics.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines[-200:]) if one.get("slowest_rank") == 1]

    recorded = wait_for(find_recorded, "no record says who is slowest")[-1]
    assert (recorded["slowest_in"], recorded["bound"], recorded["stale_ranks"]) == ("forward", "rank", 0)
    assert recorded["skew_s"] > 0.02


@pytest.mark.slow
def test_a_timeline_of_all_ranks_is_one_chrome_trace(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert run(["top", str(job.folder), "--timeline", str(path), "--seconds", "1"]) == 0
    assert "of 2 ranks; open it in https://ui.perfetto.dev" in " ".join(capsys.readouterr().out.split())
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        assert {event["name"] for event in spans if event["pid"] == rank} >= {"fetch", "forward", "backward"}
    assert sorted(one.name for one in (job.folder / "ranks").iterdir() if "timeline" in one.name) == []


@pytest.mark.slow
def test_a_real_prometheus_answers_every_question_of_the_dashboard(job: Job, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        skip_or_fail_in_ci("no Prometheus: run prometheus.sh in tests/servers as root on Debian")
    port = free_port()
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:9100", f"127.0.0.1:{job.port}").replace("scrape_interval: 5s", "scrape_interval: 1s")
    (tmp_path / "prometheus.yml").write_text(text)
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:

        def ask(expression: str) -> list[Any]:
            assert server.poll() is None, "Prometheus has ended"
            filled = expression.replace("$job", ".*").replace("$rank", ".*").replace("$__rate_interval", "30s")
            query = urllib.parse.urlencode({"query": filled})
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=20) as answer:
                    found: list[Any] = json.load(answer)["data"]["result"]
            except ConnectionError:
                return []
            except urllib.error.HTTPError as exc:
                raise AssertionError(f"{filled}: {exc.read().decode()}") from exc
            except urllib.error.URLError:
                return []
            return found

        for expression in expressions():
            if not names_in([expression]) & OF_A_GPU:
                wait_for(lambda asked=expression: ask(asked), f"no answer to {expression}")
        assert {one["metric"]["rank"] for one in ask('penstock_loader_ready_batches{rank=~"$rank"}')} == {"0", "1"}
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_a_job_that_was_killed_is_told_of_and_not_waited_for(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of this file: it ends the job."""
    for one in read_ranks(job.folder):
        os.kill(one.pid, signal.SIGKILL)
    found = wait_for(lambda: (seen := look(job, capsys))["state"] and seen, "nobody noticed")
    assert found["state"].startswith("All ranks have been silent for ")
    assert sorted(found["survey"]["stale"]) == ["0", "1"]
