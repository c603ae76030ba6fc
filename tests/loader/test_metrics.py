"""What the counters add up to, and which stage they name as the bottleneck."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import threading
import time
from typing import Any

import pytest

from penstock.loader.counters import Counters, Levels, Totals
from penstock.loader.metrics import LoaderMetrics, find_bottleneck
from penstock.storage.observability.counts import StoreCounts
from penstock.storage.observability.timeline import Timeline


def test_sums_of_many_threads_are_complete() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(500):
            counters.add(batches=1, fetch_s=0.5)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals() == Totals(batches=4000, fetch_s=2000.0)


def test_totals_do_not_change_once_they_are_taken() -> None:
    counters = Counters()
    before = counters.totals()
    counters.add(samples=3)
    assert (before.samples, counters.totals().samples) == (0, 3)


def test_an_unknown_counter_is_refused() -> None:
    with pytest.raises(KeyError, match="sample"):
        Counters().add(sample=1)


def test_metrics_hold_every_total_and_go_through_json() -> None:
    counters = Counters()
    counters.add(batches=2, fetch_s=1.5)
    levels, store = Levels(resident_bytes=7, ready_batches=3), StoreCounts(requests=4, cache_hits=5)
    metrics = LoaderMetrics.read(counters, levels, store)
    assert json.loads(json.dumps(metrics.to_dict())) == dataclasses.asdict(metrics)
    assert metrics.to_dict() == {
        **counters.totals().to_dict(),
        **dataclasses.asdict(store),
        **dataclasses.asdict(levels),
        "elapsed_s": metrics.elapsed_s,
        "bottleneck": "consumer",
    }
    assert metrics.elapsed_s > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.batches = 3  # type: ignore[misc]


def test_the_public_fields_are_these_and_each_is_explained() -> None:
    assert {field.name: field.type for field in dataclasses.fields(LoaderMetrics)} == {
        "batches": "int",
        "samples": "int",
        "packed_sequences": "int",
        "packed_documents": "int",
        "packed_tokens": "int",
        "padding_tokens": "int",
        "cut_documents": "int",
        "truncated_documents": "int",
        "truncated_tokens": "int",
        "dropped_documents": "int",
        "dropped_tokens": "int",
        "fetched_chunks": "int",
        "fetched_bytes": "int",
        "refetched_chunks": "int",
        "evicted_chunks": "int",
        "evicted_headers": "int",
        **dict.fromkeys(("spans", "decoded_rows", "copied_batches", "copied_bytes"), "int"),
        "fetch_s": "float",
        "check_s": "float",
        "open_s": "float",
        "chunk_wait_s": "float",
        "assemble_s": "float",
        "decode_s": "float",
        "copy_s": "float",
        "backpressure_s": "float",
        "first_batch_s": "float",
        "consumer_wait_s": "float",
        "consumer_busy_s": "float",
        **dict.fromkeys(("requests", "retries", "throttled_requests", "hedges", "hedges_won"), "int"),
        **dict.fromkeys(("cache_hits", "cache_misses", "cache_hit_bytes", "cache_miss_bytes"), "int"),
        **dict.fromkeys(("cache_uncached", "cache_corrupt"), "int"),
        **dict.fromkeys(("waiting_batches", "ready_batches", "queued_chunks", "chunks_in_flight"), "int"),
        **dict.fromkeys(("resident_chunks", "resident_bytes", "peak_bytes", "process_bytes"), "int"),
        **dict.fromkeys(("fetch_threads", "decode_threads", "decode_processes", "loader_process"), "int"),
        **dict.fromkeys(("read_ahead_bytes", "tuning_changes"), "int"),
        "tuning": "str",
        **dict.fromkeys(("running_requests", "request_limit"), "int"),
        "elapsed_s": "float",
        "bottleneck": "str",
    }
    explained = re.findall(r"^ {4}(\w+): ", inspect.cleandoc(LoaderMetrics.__doc__ or ""), re.MULTILINE)
    assert explained == [field.name for field in dataclasses.fields(LoaderMetrics)]


BUSY = {"batches": 1, "consumer_wait_s": 5.0, "consumer_busy_s": 5.0}


@pytest.mark.parametrize(
    ("sums", "stage"),
    [
        ({}, "nothing read yet"),
        ({"batches": 1, "consumer_wait_s": 0.5, "consumer_busy_s": 9.5, "fetch_s": 100.0}, "consumer"),
        ({"batches": 1, "first_batch_s": 5.0, "chunk_wait_s": 4.0, "assemble_s": 1.0, "fetch_s": 2.0}, "storage"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "fetch_s": 2.0, "open_s": 1.0}, "storage"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "fetch_s": 1.0, "open_s": 2.0}, "open"),
        ({**BUSY, "chunk_wait_s": 1.0, "assemble_s": 2.0, "decode_s": 1.0}, "assemble"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "decode_s": 9.0}, "decode"),
        ({**BUSY, "assemble_s": 1.0, "decode_s": 1.0, "copy_s": 2.0}, "copy"),
    ],
)
def test_the_bottleneck_is_the_stage_that_the_others_wait_for(sums: dict[str, Any], stage: str) -> None:
    assert find_bottleneck(Totals(**sums)) == stage


def test_the_time_between_two_metrics_has_sums_and_a_bottleneck_of_its_own() -> None:
    counters = Counters()
    counters.add(batches=1, consumer_wait_s=9.0, consumer_busy_s=1.0, chunk_wait_s=9.0, fetch_s=9.0)
    before = LoaderMetrics.read(counters, Levels(ready_batches=1), StoreCounts(requests=10))
    assert before.since(before).bottleneck == "no batch was taken"
    counters.add(batches=2, consumer_wait_s=0.0, consumer_busy_s=5.0)
    now = LoaderMetrics.read(counters, Levels(ready_batches=7), StoreCounts(requests=13))
    change = now.since(before)
    assert (change.batches, change.consumer_busy_s, change.requests, change.ready_batches) == (2, 5.0, 3, 7)
    assert (before.bottleneck, change.bottleneck) == ("storage", "consumer")
    assert change.elapsed_s == now.elapsed_s - before.elapsed_s


def test_seconds_given_together_are_drawn_one_after_another_and_end_now() -> None:
    counters = Counters()
    counters.add(fetch_s=5.0)  # nobody records
    counters.timeline = Timeline()
    counters.timeline._began_s -= 100.0
    counters.add(fetch_s=2.0, batches=1, open_s=1.0)
    counters.add(consumer_busy_s=2.0, consumer_wait_s=0.5)  # only what the loader did is drawn
    after, before, wait = [event for event in counters.timeline.events("p") if event["ph"] == "X"]
    assert [one["name"] for one in (before, after, wait)] == ["fetch", "open", "consumer wait"]
    assert (before["dur"], after["dur"]) == (2e6, 1e6)
    assert abs(before["ts"] + before["dur"] - after["ts"]) < 1  # microseconds, in a double of today's time


def test_a_timeline_is_bounded_and_says_what_it_dropped() -> None:
    timeline = Timeline(most_spans=2)
    timeline._began_s -= 10.0
    now = time.perf_counter()
    for _ in range(5):
        timeline.add("work", now - 1.0, now)
    events = timeline.events("p")
    assert sum(event["ph"] == "X" for event in events) == 2
    assert {"labels": "3 more spans were dropped"} in [event["args"] for event in events if event["ph"] == "M"]


@pytest.mark.parametrize(
    ("sums", "store", "words"),
    [
        ({"fetched_chunks": 10, "evicted_chunks": 5}, {}, "5 of 10 chunks were dropped before their last use"),
        (
            {"fetched_chunks": 10},
            {"requests": 100, "throttled_requests": 5},
            r"fewer requests \(5 of 100 were throttled",
        ),
        (
            {"fetched_bytes": 10**9},
            {"requests": 100},
            r"The store is the limit, at 100 MB/s, 0\.9 chunks at a time: raise memory_limit= or fetch_threads=, read",
        ),
        (
            {"fetched_bytes": 10**9, "fetch_s": 200},
            {"requests": 100},
            "limit, at 100 MB/s: read from one that is nearer",
        ),
        ({"fetched_bytes": 10**9}, {}, "The disk is the limit, at .* MB/s"),
    ],
)
def test_advice_on_storage_names_what_is_slow_about_it(sums: dict[str, int], store: dict[str, int], words: str) -> None:
    counters = Counters()
    counters.add(**{**BUSY, "chunk_wait_s": 4.0, "fetch_s": 9.0, **sums})
    counters._made_s -= 10.0
    assert re.search(words, LoaderMetrics.read(counters, Levels(), StoreCounts(**store)).advice())


def test_every_bottleneck_has_advice_and_decoding_knows_the_gil() -> None:
    counters = Counters()
    assert LoaderMetrics.read(counters, Levels(), StoreCounts()).advice() == ""
    counters.add(**BUSY, decode_s=9.0)
    counters._made_s -= 10.0
    busy = LoaderMetrics.read(
        counters, Levels(decode_threads=1), StoreCounts()
    ).advice()  # or wait for the GIL in decoding
    assert "are busy: leave threads=" in busy
    assert "processes= if it is pure Python" in busy
    assert (
        "holds the GIL, so give processes="
        in LoaderMetrics.read(counters, Levels(decode_threads=4), StoreCounts()).advice()
    )
    for stage in ("consumer", "storage", "open", "assemble", "decode", "copy"):
        told = dataclasses.replace(LoaderMetrics.read(counters, Levels(), StoreCounts()), bottleneck=stage).advice()
        assert told.endswith(".")
