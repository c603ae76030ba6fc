"""The disk cache among processes, of which some are killed."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from started_process import started_process

from penstock.storage import ByteRange, CacheStore, LocalStore
from penstock.storage.caching.disk import CacheDisk

CHUNK = 10_000
DATA = bytes(i * 11 % 251 for i in range(20 * CHUNK))
READER = """
    import sys, time
    from pathlib import Path
    from penstock.storage import ByteRange, CacheStore, LocalStore

    class Counted(LocalStore):
        def get(self, key, byte_range=None, *, etag=None):
            with open(sys.argv[3], "a") as log:
                log.write("fetch\\n")
            print("fetching", flush=True)
            time.sleep(float(sys.argv[4]))
            return super().get(key, byte_range, etag=etag)

    data = CacheStore(Counted(sys.argv[1]), sys.argv[2], 10**9).get("x", ByteRange(0, 10000))
    assert len(data) == 10000
"""


def _start_reader(root: Path, delay_s: float) -> AbstractContextManager[subprocess.Popen[str]]:
    arguments = [str(root / "data"), str(root / "cache"), str(root / "log"), str(delay_s)]
    command = [sys.executable, "-c", textwrap.dedent(READER), *arguments]
    return started_process(command, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_two_processes_that_miss_at_once_fetch_once(tmp_path: Path) -> None:
    LocalStore(tmp_path / "data").put("x", DATA)
    with _start_reader(tmp_path, 1.0) as first, _start_reader(tmp_path, 1.0) as second:
        for reader in (first, second):
            reader.communicate(timeout=60)
            assert reader.returncode == 0
    assert (tmp_path / "log").read_text() == "fetch\n"


def test_a_process_killed_while_it_fetches_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    LocalStore(tmp_path / "data").put("x", DATA)
    with _start_reader(tmp_path, 60) as killed:
        assert killed.stdout
        assert killed.stdout.readline() == "fetching\n"
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    started = time.monotonic()
    store = CacheStore(LocalStore(tmp_path / "data"), tmp_path / "cache", 10**9)
    assert store.get("x", ByteRange(0, CHUNK)) == DATA[:CHUNK]
    assert time.monotonic() - started < 30  # the killed one would have taken 60


def test_what_a_killed_writer_left_is_deleted_by_the_next_start_but_not_what_is_being_written(tmp_path: Path) -> None:
    CacheDisk(tmp_path, 10**9)
    temporary = next(tmp_path.glob("uid-*/v1/temporary"))
    (temporary / "left").write_bytes(b"half")
    with (temporary / "busy").open("wb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        CacheDisk(tmp_path, 10**9)
        assert [path.name for path in temporary.iterdir()] == ["busy"]
