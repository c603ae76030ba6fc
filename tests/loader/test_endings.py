"""However a run ends, it ends soon, and leaves nothing behind that the next start would find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tar_dataset import write_tars

from penstock import DistributedDataLoader

SCRIPT = Path(__file__).parent / "endings_script.py"
SIZES = [37, 5, 80, 1, 64, 50, 50]
END_S = 30.0  # how long "at once" may last on a busy machine; a run that is not told to end lasts much longer
SETTINGS = {
    "threads": [],
    "processes": ["processes=2"],
    "cached slow store": ["latency_s=0.2", "cache_dir=CACHE"],
    "stuck store": ["latency_s=600"],
}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No entry of the cache is left half written. (Shared memory is looked for while a run still has it open.)"""
    yield
    assert list(tmp_path.glob("cache/**/temporary/*")) == []


def start(mode: str, source: str, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The script as the leader of a process group of its own, as a terminal starts it."""
    pairs = [option.replace("CACHE", json.dumps(str(tmp_path / "cache"))) for option in options]
    return subprocess.Popen(
        [sys.executable, SCRIPT, mode, source, *pairs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def members(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


def shared_memory(group: int) -> list[str]:
    """The named objects of shared memory, semaphores among them, that a group's processes have open."""
    found = []
    for pid in members(group):
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found += [line for line in lines if "/dev/shm/" in line]
    return found


def assert_group_ends(group: int) -> None:
    until = time.monotonic() + END_S
    while members(group):
        assert time.monotonic() < until, f"{members(group)} still run"
        time.sleep(0.05)


def end_of(run: subprocess.Popen[str]) -> tuple[str, float]:
    """What a run that was told to end writes to stderr, and how long it takes to end."""
    assert shared_memory(run.pid) == []
    started = time.monotonic()
    _, errors = run.communicate(timeout=4 * END_S)
    took_s = time.monotonic() - started
    assert_group_ends(run.pid)
    return errors, took_s


@pytest.mark.parametrize("setting", ["threads", "processes", "cached slow store"])
def test_ctrl_c_in_mid_epoch_ends_the_run_soon_with_one_traceback(tars, tmp_path, nothing_left, setting):
    run = start("train", tars, tmp_path, *SETTINGS[setting])
    assert run.stdout.readline()
    os.killpg(run.pid, signal.SIGINT)
    errors, took_s = end_of(run)
    assert run.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert took_s < END_S
    if "cache_dir=CACHE" in SETTINGS[setting]:
        again = start("exit", tars, tmp_path, *SETTINGS[setting])
        assert again.stdout.readline()
        end_of(again)
        assert again.returncode == 0


@pytest.mark.parametrize("setting", ["threads", "processes", "cached slow store"])
def test_a_script_may_end_without_closing_while_batches_are_made(tars, tmp_path, nothing_left, setting):
    run = start("exit", tars, tmp_path, *SETTINGS[setting])
    assert run.stdout.readline()
    errors, took_s = end_of(run)
    assert (run.returncode, errors) == (0, "")
    assert took_s < END_S


@pytest.mark.parametrize("setting", ["threads", "processes"])
def test_an_exception_in_the_users_loop_ends_the_run_with_it(tars, tmp_path, nothing_left, setting):
    run = start("raise", tars, tmp_path, *SETTINGS[setting])
    errors, _ = end_of(run)
    assert run.returncode == 1
    assert errors.rstrip().endswith("ArithmeticError: in the user's loop")
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize("setting", ["stuck store", "processes"])
def test_close_does_not_wait_for_a_store_that_hangs(tars, tmp_path, nothing_left, setting):
    run = start("close", tars, tmp_path, *SETTINGS[setting])
    took_s = json.loads(run.stdout.readline())["took_s"]
    errors, _ = end_of(run)
    assert (run.returncode, errors) == (0, "")
    assert took_s < END_S


def test_a_killed_run_leaves_no_process_and_the_next_starts_at_once(tars, tmp_path, nothing_left):
    run = start("train", tars, tmp_path, *SETTINGS["processes"])
    assert run.stdout.readline()
    run.kill()
    end_of(run)
    with DistributedDataLoader(tars, batch_size=16) as loader:
        assert sum(1 for _ in loader) == sum(SIZES) // 16


def test_after_sigkill_of_one_of_two_ranks_nothing_is_left_and_the_epoch_is_resumed(tars, tmp_path, nothing_left):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", SCRIPT]
    run = subprocess.Popen(
        [*launcher, "train", tars, "processes=1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    said = [json.loads(run.stdout.readline()) for _ in range(2)]
    assert said[0]["state"] == said[1]["state"]
    groups = [os.getpgid(rank["process"]) for rank in said]
    os.kill(said[0]["process"], signal.SIGKILL)
    assert run.wait(4 * END_S) == 1
    run.stdout.close()
    for group in groups:
        assert_group_ends(group)
    with DistributedDataLoader(tars, batch_size=16) as loader:
        loader.load_state_dict(said[1]["state"])
        assert sum(1 for _ in loader) == (sum(SIZES) - 2 * 2 * 16) // 16
