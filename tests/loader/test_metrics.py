"""What the counters add up to, and which stage they name as the bottleneck."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from typing import Any

import pytest

from penstock.loader.metrics import Counters, LoaderMetrics, Totals, find_bottleneck


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
    metrics = counters.metrics(resident_bytes=7, peak_bytes=8)
    assert json.loads(json.dumps(metrics.to_dict())) == dataclasses.asdict(metrics)
    assert metrics.to_dict() == {
        **counters.totals().to_dict(),
        "resident_bytes": 7,
        "peak_bytes": 8,
        "bottleneck": "consumer",
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.batches = 3  # type: ignore[misc]


def test_the_public_fields_are_these_and_each_is_explained() -> None:
    assert {field.name: field.type for field in dataclasses.fields(LoaderMetrics)} == {
        "batches": "int",
        "samples": "int",
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
        "fetch_s": "float",
        "open_s": "float",
        "chunk_wait_s": "float",
        "assemble_s": "float",
        "decode_s": "float",
        "copy_s": "float",
        "backpressure_s": "float",
        "first_batch_s": "float",
        "consumer_wait_s": "float",
        "consumer_busy_s": "float",
        "resident_bytes": "int",
        "peak_bytes": "int",
        "bottleneck": "str",
    }
    explained = re.findall(r"^ {8}(\w+): ", LoaderMetrics.__doc__ or "", re.MULTILINE)
    assert explained == [field.name for field in dataclasses.fields(LoaderMetrics)]


BUSY = {"batches": 1, "consumer_wait_s": 5.0, "consumer_busy_s": 5.0}


@pytest.mark.parametrize(
    ("sums", "stage"),
    [
        ({}, "nothing read yet"),
        ({"batches": 1, "consumer_wait_s": 0.5, "consumer_busy_s": 9.5, "fetch_s": 100.0}, "consumer"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "fetch_s": 2.0, "open_s": 1.0}, "storage"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "fetch_s": 1.0, "open_s": 2.0}, "open"),
        ({**BUSY, "chunk_wait_s": 1.0, "assemble_s": 2.0, "decode_s": 1.0}, "assemble"),
        ({**BUSY, "chunk_wait_s": 4.0, "assemble_s": 1.0, "decode_s": 9.0}, "decode"),
        ({**BUSY, "assemble_s": 1.0, "decode_s": 1.0, "copy_s": 2.0}, "copy"),
    ],
)
def test_the_bottleneck_is_the_stage_that_the_others_wait_for(sums: dict[str, Any], stage: str) -> None:
    assert find_bottleneck(Totals(**sums)) == stage
