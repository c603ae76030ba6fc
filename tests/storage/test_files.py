"""Files that are whole or absent, and locks that nobody waits for in vain."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from started_process import started_process

from penstock.storage.files import (
    TEMPORARY_PREFIX,
    check_output,
    lock_file,
    replacing,
    sync_folder,
    try_flock,
    write_all,
    write_output,
    write_whole,
)


def run_python(program: str, *arguments: object) -> str:
    """What a new interpreter prints: a process's umask is nobody else's there."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_a_new_file_has_the_permissions_that_the_umask_allows(tmp_path: Path, umask: int) -> None:
    program = """
        import os, sys
        from penstock.storage import LocalStore
        from penstock.storage.files import write_whole
        os.umask(int(sys.argv[2]))
        write_whole(sys.argv[1] + "/whole", b"x")
        LocalStore(sys.argv[1]).put("put", b"x")
    """
    run_python(program, tmp_path, umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"whole": 0o666 & ~umask, "put": 0o666 & ~umask}


def test_neither_import_nor_writing_threads_touch_the_umask(tmp_path: Path) -> None:
    program = """
        import os, sys, threading
        real, calls = os.umask, []
        os.umask = lambda mask: calls.append(mask) or real(mask)
        import penstock.storage
        from penstock.storage.files import write_whole
        real(0o027)
        names = [f"{sys.argv[1]}/{i}" for i in range(64)]
        def write(part):
            for name in names[part::8]:
                write_whole(name, b"x")
        threads = [threading.Thread(target=write, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(calls, {oct(os.stat(name).st_mode & 0o777) for name in names})
    """
    assert run_python(program, tmp_path).strip() == "[] {'0o640'}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        bytearray(b"abc"),
        memoryview(array.array("d", [1.5, 2.5])),
        memoryview(array.array("d")),
        memoryview(np.arange(12, dtype=np.uint32).reshape(3, 4)),
        memoryview(np.arange(12, dtype=np.int16).reshape(3, 4))[::2],
        memoryview(b"abcdef")[::2],
        memoryview(np.array(7)),
    ],
)
def test_all_bytes_are_written_whatever_the_items_are(
    tmp_path: Path, data: bytes | bytearray | memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = data.tobytes() if isinstance(data, memoryview) else bytes(data)
    write_whole(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == expected
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, rest: real(fd, rest[:5]))  # as the kernel may
    with replacing(tmp_path / "x") as fd:
        write_all(fd, data)
    assert (tmp_path / "x").read_bytes() == expected


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "x", b"old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, refuse)
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "x", b"new", durable=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with replacing(tmp_path / "x") as fd:
            write_all(fd, b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_in_between_leaves_the_old_file_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", b"old")
    program = """
        import sys, time
        from penstock.storage.files import replacing, write_all
        with replacing(sys.argv[1] + "/x") as fd:
            write_all(fd, b"half of the new")
            print("written", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with started_process(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert (tmp_path / "x").read_bytes() == b"old"
    left = [path.name for path in tmp_path.iterdir() if path.name != "x"]
    assert len(left) == 1
    assert left[0].startswith(TEMPORARY_PREFIX)
    write_whole(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_durable_file_is_synced_before_and_its_folder_after_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")  # noqa: PTH112
        fsync(fd)

    def note_replace(source: str, target: str, **_: object) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_whole(tmp_path / "x", b"x", durable=True)
    assert steps == ["file", "rename", "folder"]
    write_whole(tmp_path / "x", b"x")
    assert steps[3:] == ["rename"]


def test_a_path_without_a_folder_is_in_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("x", b"x", durable=True)
    assert (tmp_path / "x").read_bytes() == b"x"


def test_threads_that_write_one_file_at_once_leave_one_whole_content(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_whole, args=(tmp_path / "x", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "x").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_none_can_not_be_synced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "file")


def test_a_lock_that_another_holds_is_waited_for_in_vain_and_then_had(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock", wait_s=0) as first:
        assert first
        with lock_file(tmp_path / "lock", wait_s=0.05) as second:
            assert not second
    with lock_file(tmp_path / "lock", wait_s=0) as again:
        assert again


def test_a_lock_is_had_as_soon_as_its_holder_lets_go(tmp_path: Path) -> None:
    holding, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_file(tmp_path / "lock", wait_s=0):
            holding.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    threading.Timer(0.1, let_go.set).start()
    with lock_file(tmp_path / "lock", wait_s=60) as locked:
        assert locked
    thread.join()


def test_where_there_is_no_folder_or_no_lock_it_is_said_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_file(tmp_path / "none" / "lock", wait_s=60) as locked:
        assert not locked

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "x").open("wb") as file:
        assert not try_flock(file.fileno(), 60)


def test_what_a_user_names_that_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    check_output(pipe)
    write_output(pipe, b"a page")
    reader.join()
    assert read == [b"a page"]
    assert pipe.is_fifo()


def test_whether_an_output_can_be_written_is_told_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"an older page")
    check_output(tmp_path / "page")
    check_output(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    assert (tmp_path / "page").read_bytes() == b"an older page"
    for wrong in (tmp_path, tmp_path / "no/page"):
        with pytest.raises(OSError, match="directory"):
            check_output(wrong)


def test_a_link_to_an_open_file_is_written_through_and_stays(tmp_path: Path) -> None:
    for through in ("", "two"):  # as /dev/stdout, and as a link to it
        with open(tmp_path / "to", "w+b") as file:  # noqa: PTH123
            link = tmp_path / f"stdout{through}"
            link.symlink_to(f"/proc/self/fd/{file.fileno()}" if not through else tmp_path / "again")
            if through:
                (tmp_path / "again").symlink_to(f"/proc/self/fd/{file.fileno()}")
            check_output(link)
            write_output(link, b"a page")
            assert link.is_symlink()
            assert file.read() == b"a page"
            write_output(f"/proc/self/fd/{file.fileno()}", b"the next")
            assert (tmp_path / "to").read_bytes() == b"the next"
