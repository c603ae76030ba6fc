"""What a store did is counted over all the layers that it is composed of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.storage import Fault, MemoryStore, ThrottledError, open_store
from penstock.storage.observability import process_usage
from penstock.storage.observability.counts import StoreCounts, count_running, count_store
from penstock.storage.observability.process_usage import peak_resident_bytes, read_traffic, resident_bytes

KEY = bytes(range(32))


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore(f"mem://counts-{uuid4().hex[:8]}/data").create()
    yield store
    store.drop()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_requests_and_cache_hits_are_counted_through_every_layer(
    memory: MemoryStore, tmp_path: Path, *, cached: bool, encrypted: bool
) -> None:
    options = {"encryption_key": KEY} if encrypted else None
    store = open_store(memory.url, storage_options=options, cache_dir=tmp_path if cached else None)
    info = store.put("a", b"x" * 1000)
    before = count_store(store)
    memory.inject(Fault(error=ThrottledError))
    for _ in range(2):
        assert bytes(store.get("a", etag=info.etag)) == b"x" * 1000
    found = count_store(store)
    assert (found.throttled_requests, found.retries) == (1, 1)
    assert found.requests > before.requests + 1
    assert (found.cache_hits > 0, found.cache_misses > 0) == (cached, cached)
    assert count_running(store)[0] == 0 < count_running(store)[1]
    store.close()
    assert count_store(store) == found


def test_local_files_have_no_counts_and_no_store_has_none(tmp_path: Path) -> None:
    for store in (open_store(tmp_path), None):
        assert count_store(store) == StoreCounts()
        assert count_running(store) == (0, 0)


@pytest.mark.slow
def test_the_peak_of_a_process_is_its_own_and_not_that_of_who_started_it() -> None:
    held = bytearray(b"x") * (300 << 20)
    code = "from penstock.storage.observability.process_usage import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert peak_resident_bytes() > len(held)
    assert 1 << 20 < int(done.stdout) < len(held)


def test_memory_and_traffic_of_the_process_are_read(tmp_path: Path) -> None:
    before = resident_bytes()
    assert before is not None
    assert before > 1 << 20
    found = read_traffic()
    assert all(amount >= 0 for amount in found.values())
    assert set(found) <= {
        "disk_read_bytes",
        "disk_written_bytes",
        "network_received_bytes",
        "network_sent_bytes",
    }


@pytest.mark.parametrize(
    ("hardware", "expected"), [(("eth0", "eth1"), (30, 300)), ((), (165, 1650))], ids=["a host", "a container"]
)
def test_traffic_is_counted_once_where_a_device_stands_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: tuple[str, ...], expected: tuple[int, int]
) -> None:
    numbers = {"lo": 7, "eth0": 10, "eth1": 20, "bond0": 30, "bond0.5": 5, "docker0": 100}
    lines = [f"{name}: {n} 0 0 0 0 0 0 0 {10 * n} 0 0 0 0 0 0 0" for name, n in numbers.items()]
    (tmp_path / "dev").write_text("\n".join(["Inter-|", " face |", *lines]) + "\n")
    for name in hardware:
        (tmp_path / "net" / name / "device").mkdir(parents=True)
    monkeypatch.setattr(process_usage, "_NETWORK", str(tmp_path / "dev"))
    monkeypatch.setattr(process_usage, "_DEVICES", str(tmp_path / "net"))
    found = read_traffic()
    assert (found["network_received_bytes"], found["network_sent_bytes"]) == expected
