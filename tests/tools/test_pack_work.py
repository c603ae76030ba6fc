"""``pack`` with a function, in processes, and again after it was stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_samples import read_samples
from started_process import started_process

from penstock import TokensFormat, open_manifest, pack, verify
from penstock.loader import ConfigError, DatasetError, WorkerError
from penstock.storage import AccessDeniedError, MemoryStore
from penstock.storage.threads import daemon_pool
from penstock.tools.packing import target as target_module
from penstock.tools.packing.dataset import DatasetSource
from penstock.tools.packing.mapping import _ctrl_c_held_back


def thin(sample: dict[str, Any]) -> Any:
    """Drops every third sample, and makes two of every seventh."""
    if sample["n"] % 3 == 0:
        return None
    return [sample, {**sample, "n": -sample["n"]}] if sample["n"] % 7 == 0 else sample


def fail_at_70(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["n"] == 70:
        raise KeyError("no such word")
    return sample


def give_number(sample: dict[str, Any]) -> Any:
    return sample["n"]


def end_process(sample: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"n": n, "text": f"text number {n} "}) + "\n" for n in range(500)))
    return file


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "manifest" not in path.name}


def test_a_function_may_drop_samples_and_make_several(rows: Path, tmp_path: Path) -> None:
    pack(rows, tmp_path / "out", format="parquet", map=thin)
    expected = [m for n in range(500) if n % 3 for m in ((n, -n) if n % 7 == 0 else (n,))]
    assert [sample["n"] for sample in read_samples(str(tmp_path / "out"))] == expected


@pytest.mark.slow
def test_processes_write_the_very_bytes_that_one_writes(rows: Path, tmp_path: Path) -> None:
    pack(rows, tmp_path / "one", map=thin, shard_bytes=50_000)
    pack(rows, tmp_path / "two", map=thin, shard_bytes=50_000, processes=2)
    assert read_bytes(tmp_path / "one") == read_bytes(tmp_path / "two")
    some: Any = {"format": "tokens", "seq_len": 16, "tokenizer": encode}
    pack(rows, tmp_path / "three", **some)
    pack(({"text": f"text number {n} "} for n in range(500)), tmp_path / "four", processes=2, **some)
    assert read_bytes(tmp_path / "three") == read_bytes(tmp_path / "four")


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_function_that_fails_is_named_with_the_sample_and_the_line(
    rows: Path, tmp_path: Path, processes: int
) -> None:
    with pytest.raises(DatasetError, match=r"sample 70.*map= failed with KeyError.*test_pack_work\.py, line \d+"):
        pack(rows, tmp_path / "out", map=fail_at_70, processes=processes)
    with pytest.raises(DatasetError, match=r"sample 0.*map= returned a int; it must return a dict"):
        pack(rows, tmp_path / "out", map=give_number, processes=processes)


@pytest.mark.slow
def test_functions_and_processes_that_cannot_work_are_refused(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to processes"):
        pack(rows, tmp_path / "out", map=lambda sample: sample, processes=1)
    with pytest.raises(WorkerError, match="processes ended by itself"):
        pack(rows, tmp_path / "out", map=end_process, processes=1)
    with pytest.raises(ConfigError, match="processes=-1"):
        pack(rows, tmp_path / "out", processes=-1)


FORMATS = ("tar", "parquet", "arrow", "jsonl", "mds", "tokens")


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("bad_shard", [0, 1, 5])
def test_a_pack_that_stopped_goes_on_and_gives_the_same_samples(
    rows: Path,
    tmp_path: Path,
    memory_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    format_name: Any,
    bad_shard: int,
) -> None:
    small = {"tar": 8_000, "tokens": 600, "parquet": 500, "arrow": 1_000}.get(format_name, 2_000)
    options: dict[str, Any] = {"format": format_name, "shard_bytes": small, "map": thin}
    if format_name == "tokens":
        options |= {"seq_len": 7, "tokenizer": encode}
    pack(rows, tmp_path / "whole", **options)
    stop_at(bad_shard, monkeypatch, lambda: pack(rows, memory_store.url, **options))
    summary = pack(rows, memory_store.url, **options)
    assert summary.kept_shards == bad_shard
    assert _plain(read_samples(memory_store.url)) == _plain(read_samples(str(tmp_path / "whole")))
    assert verify(memory_store.url).ok
    given = TokensFormat(seq_len=7) if format_name == "tokens" else None
    assert open_manifest(memory_store.url, format=given, rebuild=True).num_samples == summary.samples


def stop_at(bad_shard: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Storing one shard fails; others, later ones among them, are stored."""
    put_one = target_module.Target._put_one

    def put(self: Any, number: int, shard: Any) -> Any:
        if number == bad_shard:
            raise AccessDeniedError("no")
        return put_one(self, number, shard)

    with monkeypatch.context() as patch:
        patch.setattr(target_module.Target, "_put_one", put)
        with pytest.raises(AccessDeniedError):
            run()


MARK: Any = b"one"


def marked(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"mark": MARK}


def _plain(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: np.asarray(value).tolist() for name, value in sample.items()} for sample in samples]


@pytest.mark.slow
def test_another_job_starts_anew(rows: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(5, monkeypatch, lambda: pack(rows, memory_store.url, map=thin, shard_bytes=8_000))
    assert pack(rows, memory_store.url, shard_bytes=8_000).kept_shards == 0
    assert [sample["n"] for sample in read_samples(memory_store.url)] == [str(n).encode() for n in range(500)]


@pytest.mark.slow
def test_a_function_of_other_constants_is_another_job(
    rows: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(5, monkeypatch, lambda: pack(rows, memory_store.url, map=marked, shard_bytes=8_000))
    monkeypatch.setitem(marked.__globals__, "MARK", b"other")
    assert pack(rows, memory_store.url, map=marked, shard_bytes=8_000).kept_shards == 0
    assert {bytes(sample["mark"]) for sample in read_samples(memory_store.url)} == {b"other"}


@pytest.mark.slow
def test_a_function_of_the_same_constants_is_the_same_job(
    rows: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(5, monkeypatch, lambda: pack(rows, memory_store.url, map=marked, shard_bytes=8_000))
    assert pack(rows, memory_store.url, map=marked, shard_bytes=8_000).kept_shards > 0


@pytest.mark.slow
def test_a_function_that_uses_an_object_of_its_module_is_never_known_again(
    rows: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(marked.__globals__, "MARK", memoryview(b"a tokenizer, say"))
    stop_at(5, monkeypatch, lambda: pack(rows, memory_store.url, map=marked, shard_bytes=8_000))
    assert pack(rows, memory_store.url, map=marked, shard_bytes=8_000).kept_shards == 0


_KILLED = """
import sys, time
from penstock.tools.packing import target
from penstock.tools.packing.tar import TarWriter
target._SAVE_EVERY_S = 0.0
add = TarWriter.add
def slow(self, item):
    time.sleep(0.002)
    return add(self, item)
TarWriter.add = slow
from penstock import pack
pack(sys.argv[1], sys.argv[2], shard_bytes=8_000, progress=False)
"""


@pytest.mark.slow
def test_a_killed_pack_goes_on_where_it_stopped(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started_process([sys.executable, "-c", _KILLED, str(rows), str(out)]) as process:
        wait_for(lambda: len(list(out.glob("shard-*.tar"))) >= 12)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with pytest.raises(DatasetError, match="interrupted"):
        open_manifest(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*.tar")}
    summary = pack(rows, out, shard_bytes=8_000, progress=False)
    assert summary.kept_shards >= 5
    kept = [name for name, at in before.items() if (out / name).stat().st_mtime_ns == at]
    assert len(kept) == summary.kept_shards
    assert [sample["n"] for sample in read_samples(str(out))] == [str(n).encode() for n in range(500)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reads", "puts"])
def test_ctrl_c_waits_for_no_request_that_hangs(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    released, hanging, calls = threading.Event(), threading.Event(), itertools.count()

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        def hung(*args: Any) -> Any:
            if what == "reads" and args[1] == 0:
                return function(*args)
            hanging.set()
            assert released.wait(30)
            return function(*args)

        return hung

    def interrupt(sample: dict[str, Any]) -> dict[str, Any]:
        if what == "reads" or next(calls) == 64:  # two shards are being put
            assert hanging.wait(60)
            raise KeyboardInterrupt
        return sample

    source: Path = tmp_path / "source"
    pack(rows, source, shard_bytes=8_000, progress=False)
    monkeypatch.setattr(target_module, "_INTERRUPTED_S", 0.05)
    monkeypatch.setattr(daemon_pool, "_INTERRUPTED_S", 0.05)
    owner: Any = DatasetSource if what == "reads" else target_module.Target
    name = "_read" if what == "reads" else "_put_one"
    monkeypatch.setattr(owner, name, hang(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out", map=interrupt, shard_bytes=60_000, progress=False)
    assert hanging.is_set()
    released.set()


def test_the_progress_bar_knows_the_total(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextmanager
    def note(label: str, total: int | None, **_: Any) -> Iterator[Any]:
        seen.append(total)
        yield seen.append

    monkeypatch.setattr(sys.modules["penstock.tools.pack"], "show_progress", note)
    pack(rows, tmp_path / "out", map=thin)
    assert seen[0] == 500
    assert sum(seen[1:]) == 500


def note_process(sample: dict[str, Any]) -> dict[str, Any]:
    Path(os.environ["NOTED_PROCESSES"], str(os.getpid())).touch()
    time.sleep(600)
    return sample


_IN_PROCESSES = """
import sys
from penstock import pack
from test_pack_work import note_process
if __name__ == "__main__":
    pack(sys.argv[1], sys.argv[2], map=note_process, processes=2, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(rows: Path, tmp_path: Path, sent: signal.Signals) -> None:
    noted = tmp_path / "noted"
    noted.mkdir()
    script = tmp_path / "script.py"
    script.write_text(_IN_PROCESSES)
    environment = {**os.environ, "NOTED_PROCESSES": str(noted), "PYTHONPATH": python_path()}
    command = [sys.executable, str(script), str(rows), str(tmp_path / "out")]
    with started_process(command, env=environment, stderr=subprocess.PIPE) as process:
        wait_for(lambda: len(list(noted.iterdir())) == 2)
        process.send_signal(sent)
        process.communicate(timeout=60)
        assert process.returncode != 0
        wait_for(lambda: not any(Path("/proc", path.name).exists() for path in noted.iterdir()))


def python_path() -> str:
    """With which another process finds what this module imports, and this module."""
    folder = Path(__file__).parent
    folders = (folder, folder.parent, folder.parent / "loader")
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_while_processes_start_is_told_of_once(rows: Path, tmp_path: Path) -> None:
    """A terminal sends it to all processes of the command."""
    command = [sys.executable, "-m", "penstock.cli", "pack", str(rows), str(tmp_path / "out")]
    command += ["--map", "test_pack_work:thin", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with started_process(command, env=environment, stderr=subprocess.PIPE) as process:
        wait_for(lambda: any("numpy" in libraries for libraries in libraries_of_others(process.pid)))
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in told


def test_ctrl_c_that_another_thread_gets_waits_until_a_process_is_started() -> None:
    """Python raises it in the main thread, whose mask does not matter then."""
    begun, sent = threading.Event(), threading.Event()

    def send() -> None:
        begun.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    ends = []

    def start() -> None:
        with _ctrl_c_held_back():
            begun.set()
            sent.wait(60)
            thread.join()
            ends.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert ends == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def libraries_of_others(session: int) -> list[str]:
    """What the processes of a session but the first have in memory: those that have begun to import."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.getsid(int(entry.name)) == session != int(entry.name):
                found.append((entry / "maps").read_text())
    return found
