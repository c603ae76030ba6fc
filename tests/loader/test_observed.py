"""What a running loader tells those who look on: levels, the store's counts, Prometheus, a timeline."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader import (
    ConfigError,
    LoaderClosedError,
    LoaderMetrics,
    Mixture,
    MixtureMetrics,
    serve_metrics,
)
from penstock.storage.errors import ThrottledError
from penstock.storage.memory_store import Fault, MemoryStore


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[DistributedDataLoader[Any]]:
    write_tars(tmp_path / "data", [40, 40, 40])
    with DistributedDataLoader(tmp_path / "data", batch_size=8, transform=dict, threads=2) as opened:
        yield opened


def scrape(url: str) -> dict[str, Any]:
    """Each metric of an endpoint by name, with its type and (labels, value) pairs."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    return {
        sample.name: (family.type, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_pass_is_counted_at_every_stage_and_stays_known_after_close(loader: DistributedDataLoader[Any]) -> None:
    assert loader.metrics().bottleneck == "nothing read yet"
    batches = len(list(loader))
    seen = loader.metrics()
    assert (seen.batches, seen.samples) == (batches, 8 * batches)
    assert seen.decoded_rows >= 120
    assert seen.spans >= 1
    assert min(seen.fetch_s, seen.check_s, seen.open_s, seen.assemble_s, seen.decode_s, seen.elapsed_s) > 0
    assert (seen.fetch_threads, seen.decode_threads) == (4, 2)
    assert seen.process_bytes > 10 << 20
    assert (seen.requests, seen.cache_hits, seen.request_limit) == (0, 0, 0)  # local files
    loader.close()
    assert loader.metrics().samples == seen.samples
    assert loader.metrics().waiting_batches == 0


def test_the_wait_for_the_first_batch_is_counted_from_when_the_loop_asks_for_it(
    loader: DistributedDataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_to_tell() -> int:
        time.sleep(0.3)
        return 1 << 30

    monkeypatch.setattr("penstock.loader.pipeline.tuning.usable_memory", slow_to_tell)
    batches = iter(loader)
    asked_s = time.perf_counter()
    next(batches)
    waited_s = time.perf_counter() - asked_s
    assert 0.3 <= loader.metrics().first_batch_s <= waited_s


def test_queues_fill_while_the_training_loop_does_something_else(loader: DistributedDataLoader[Any]) -> None:
    batches = iter(loader)
    next(batches)
    deadline_s = time.monotonic() + 60
    while loader.metrics().ready_batches < 5:
        assert time.monotonic() < deadline_s, "no batches were made ahead"
        time.sleep(0.01)
    seen = loader.metrics()
    assert seen.ready_batches <= seen.waiting_batches
    assert seen.resident_chunks + seen.chunks_in_flight + seen.queued_chunks >= 1
    assert 0 < seen.resident_bytes <= seen.peak_bytes


def test_retries_throttling_and_the_cache_are_counted(
    memory_store: MemoryStore, put_shards: Callable[..., list[int]], tmp_path: Path
) -> None:
    put_shards(memory_store, 3)
    with DistributedDataLoader(memory_store.url, batch_size=5, cache_dir=tmp_path / "cache") as loader:
        memory_store.inject(Fault(error=ThrottledError), times=2)
        list(loader)
        cold = loader.metrics()
        assert (cold.throttled_requests, cold.retries) == (2, 2)
        assert cold.requests >= cold.cache_misses + 2
        assert cold.cache_miss_bytes >= cold.fetched_bytes > 0
        assert cold.request_limit >= 1
    with DistributedDataLoader(memory_store.url, batch_size=5, cache_dir=tmp_path / "cache") as loader:
        list(loader)
    warm = loader.metrics()
    assert (warm.cache_misses, warm.requests) == (0, 0)
    assert warm.cache_hits >= warm.fetched_chunks > 0


@pytest.mark.slow
def test_prometheus_gets_every_number_of_the_metrics_and_no_free_words(loader: DistributedDataLoader[Any]) -> None:
    server = serve_metrics(loader)
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    list(loader)
    while True:  # threads work ahead
        before, found, seen = loader.metrics(), scrape(server.url), loader.metrics()
        if (before.fetch_s, before.assemble_s, before.decode_s) == (seen.fetch_s, seen.assemble_s, seen.decode_s):
            break
    assert found["penstock_loader_samples_total"] == ("counter", {"rank": "0"}, seen.samples)
    assert found["penstock_loader_fetch_seconds_total"][2] == seen.fetch_s
    assert found["penstock_loader_ready_batches"][0] == "gauge"
    assert found["penstock_loader_bottleneck"][1:] == ({"rank": "0", "stage": seen.bottleneck}, 1)
    assert len([name for name in found if not name.endswith("_created")]) == len(seen.to_dict()) - 1  # `tuning`


def test_a_mixture_tells_of_each_source_and_between_two_moments(tmp_path: Path) -> None:
    write_tars(tmp_path / "web", [40])
    write_tars(tmp_path / "code", [40])
    mixture = Mixture({str(tmp_path / "web"): 0.75, str(tmp_path / "code"): 0.25})
    with DistributedDataLoader(mixture, batch_size=8, rank=0, world_size=1) as loader:
        batches = iter(loader)
        next(batches)
        before = loader.metrics()
        next(batches)
        change = loader.metrics().since(before)
        assert (change.batches, change.samples) == (1, 8)
        assert isinstance(change, MixtureMetrics)
        assert change.run_samples == sum(one.samples for one in change.sources.values()) == 16  # levels: those of now
        with urllib.request.urlopen(serve_metrics(loader).url, timeout=20) as answer:
            page = answer.read().decode()
        for name, progress in change.sources.items():
            assert f'penstock_loader_source_samples{{rank="0",source="{name}"}} {float(progress.samples)}' in page
        assert "source_tokens" not in page  # not all samples have as many


def test_every_served_number_is_explained(loader: DistributedDataLoader[Any]) -> None:
    with urllib.request.urlopen(serve_metrics(loader).url, timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    helps = {line.split()[2]: line for line in lines if line.startswith("# HELP")}
    assert "second requests sent because the first was late." in helps["penstock_loader_hedges_total"]
    assert len(helps) == len(loader.metrics().to_dict()) - 1  # `tuning` is free words
    assert not [line for line in helps.values() if len(line.split()) < 6]


@pytest.mark.slow
def test_the_endpoint_ends_with_the_loader_and_does_not_keep_it(loader: DistributedDataLoader[Any], tmp_path: Path):
    server = serve_metrics(loader)
    with pytest.raises(ConfigError, match=rf"port={server.port} cannot be served .*in use.*give a free port"):
        serve_metrics(loader, port=server.port)
    loader.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(server.url)
    with pytest.raises(LoaderClosedError):
        serve_metrics(loader)

    forgotten = serve_metrics(DistributedDataLoader(tmp_path / "data", batch_size=8))
    gc.collect()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(forgotten.url)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_port(loader: DistributedDataLoader[Any]) -> None:
    server = serve_metrics(loader)
    ours, its = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        its.sendall(b"-")
        its.recv(1)  # until the parent has looked
        os._exit(0)
    its.close()
    try:
        assert ours.recv(1) == b"-"
        assert "penstock_loader_batches_total" in scrape(server.url)
        loader.close()
        with socket.create_server(("127.0.0.1", server.port)):
            pass
    finally:
        ours.close()
        os.waitpid(child, 0)


@pytest.mark.parametrize("port", [-1, 65536, "9100", True])
def test_what_is_no_port_is_refused(loader: DistributedDataLoader[Any], port: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no port; give one from 1 to 65535"):
        serve_metrics(loader, port=port)


@pytest.mark.slow
def test_only_this_machine_reaches_the_endpoint_or_those_who_know_the_token(
    loader: DistributedDataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve_metrics(loader)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", server.port))  # another address of this machine
    with pytest.raises(ConfigError, match=r"address='0\.0\.0\.0' is reached by others; set PENSTOCK_METRICS_TOKEN"):
        serve_metrics(loader, address="0.0.0.0")
    monkeypatch.setenv("PENSTOCK_METRICS_TOKEN", "token-of-the-tests")
    with pytest.raises(ConfigError, match=r"address='203\.0\.113\.9', port=0 cannot be served"):
        serve_metrics(loader, address="203.0.113.9")
    guarded = serve_metrics(loader, address="0.0.0.0")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(f"http://127.0.0.1:{guarded.port}/metrics")
    asked = urllib.request.Request(
        f"http://127.0.0.1:{guarded.port}/metrics", headers={"Authorization": "Bearer token-of-the-tests"}
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert b"penstock_loader_batches_total" in answer.read()


def test_a_trace_shows_each_thread_at_its_stages(loader: DistributedDataLoader[Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with loader.trace(path):
        list(loader)
        (tmp_path / "second.json").write_text("an older trace")
        with pytest.raises(ConfigError, match="recorded already"), loader.trace(tmp_path / "second.json"):
            pass
        assert (tmp_path / "second.json").read_text() == "an older trace"
    recorded = json.loads(path.read_text())["traceEvents"]
    list(loader)  # no longer recorded
    threads = {event["tid"]: event["args"]["name"] for event in recorded if event["name"] == "thread_name"}
    spans = [event for event in recorded if event["ph"] == "X"]
    stages = {(threads[event["tid"]].rstrip("-0123456789_"), event["name"]) for event in spans}
    assert stages >= {
        ("penstock-fetch", "fetch"),
        ("penstock-fetch", "check"),
        ("penstock-fetch", "open"),
        ("penstock-assemble", "assemble"),
        ("penstock-decode", "decode"),
        (threading.current_thread().name, "consumer wait"),
    }
    assert min(event["ts"] for event in spans) == 0
    for own in {event["tid"] for event in spans}:  # spans of a thread lie beside or inside one another
        open_until: list[float] = []
        for event in sorted((e for e in spans if e["tid"] == own), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
            open_until.append(event["ts"] + event["dur"])


def test_a_trace_that_cannot_be_written_is_told_before_the_work(
    loader: DistributedDataLoader[Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written .*give a file that can"), loader.trace(tmp_path / "no/x"):
        pytest.fail("the block ran")
    with loader.trace(tmp_path / "x.json"):  # and leaves nothing recording
        next(iter(loader))


def test_a_block_that_raises_leaves_a_trace_and_its_own_error(
    loader: DistributedDataLoader[Any], tmp_path: Path
) -> None:
    def read_badly(path: Path) -> None:
        with loader.trace(path):
            list(loader)
            (tmp_path / "folder").rename(tmp_path / "elsewhere")
            raise ZeroDivisionError

    for path in (tmp_path / "x.json", tmp_path / "folder/y.json"):  # the second cannot be written
        (tmp_path / "folder").mkdir()
        with pytest.raises(ZeroDivisionError):
            read_badly(path)
        (tmp_path / "elsewhere").rmdir()
    assert any(event["ph"] == "X" for event in json.loads((tmp_path / "x.json").read_text())["traceEvents"])


@pytest.mark.slow
def test_metrics_are_read_by_many_threads_while_batches_are_taken(loader: DistributedDataLoader[Any]) -> None:
    seen: list[LoaderMetrics] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.append(loader.metrics())

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        list(loader)
    ended.set()
    for thread in threads:
        thread.join()
    assert loader.metrics().batches == 3 * len(loader)
    assert all(one.ready_batches <= one.waiting_batches <= 256 for one in seen)
