"""However a run ends, it ends soon, and leaves nothing behind that the next start would find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from started_process import started_process
from tar_dataset import write_tars

from penstock import DistributedDataLoader

SCRIPT = Path(__file__).parent / "endings_script.py"
SIZES = [37, 5, 80, 1, 64, 50, 50]
END_S = 30.0  # how long "at once" may last on a busy machine; a run that is not told to end lasts much longer
SETTINGS = {
    "threads": [],
    "processes": ["processes=2"],
    "process": ['place="process"'],
    "cached slow store": ["latency_s=0.2", "cache_dir=CACHE"],
    "stuck store": ["latency_s=600"],
}
PROCESSES = {"threads": 1, "processes": 3, "process": 2, "cached slow store": 1, "stuck store": 1}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


@contextmanager
def begun(mode: str, setting: str, source: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The script, mid-way, leading a process group of its own, as a terminal starts it.

    When it has ended, no process of the group is left, no file in its folders for temporary ones, and nothing half
    written in its cache.
    """
    cache, folders = tmp_path / "cache", {"TMPDIR": tmp_path / "temporary", "XDG_RUNTIME_DIR": tmp_path / "runtime"}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    options = [option.replace("CACHE", json.dumps(str(cache))) for option in SETTINGS[setting]]
    with started_process(
        [sys.executable, SCRIPT, mode, source, *options],
        env={**os.environ, **{name: str(folder) for name, folder in folders.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout.readline()
        look_at_paused(run.pid, PROCESSES[setting])
        yield run
        assert_group_ends(run.pid)
        assert list(folders["TMPDIR"].iterdir()) == []
        if "cache_dir=CACHE" in SETTINGS[setting]:
            (own,) = cache.glob("uid-*/v1")
            assert list((own / "entries").iterdir())
            assert list((own / "temporary").iterdir()) == []


def states(group: int) -> dict[int, str]:
    """The processes of a group that have not ended, and the state of each as in ``ps``."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == group and state != "Z":
            found[int(entry.parent.name)] = state
    return found


def look_at_paused(group: int, processes: int) -> None:
    """None of a group's processes, of which there are at least so many, has a name in shared memory that could stay."""
    until = time.monotonic() + END_S
    while set(states(group).values()) != {"T"}:
        assert time.monotonic() < until, f"not all stopped: {states(group)}"
        time.sleep(0.01)
    assert len(states(group)) >= processes
    for pid in states(group):
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
    os.killpg(group, signal.SIGCONT)


def assert_group_ends(group: int) -> None:
    until = time.monotonic() + END_S
    while states(group):
        assert time.monotonic() < until, f"{states(group)} still run"
        time.sleep(0.05)


def end_of(run: subprocess.Popen[str]) -> tuple[str, str, float]:
    """What a run that ends writes to stdout and stderr, and how long it takes."""
    started = time.monotonic()
    out, errors = run.communicate(timeout=4 * END_S)
    return out, errors, time.monotonic() - started


@pytest.mark.parametrize("setting", ["threads", "processes", "process", "cached slow store"])
def test_ctrl_c_in_mid_epoch_ends_the_run_soon_with_one_traceback(tars, tmp_path, setting):
    with begun("train", setting, tars, tmp_path) as run:
        os.killpg(run.pid, signal.SIGINT)
        _, errors, took_s = end_of(run)
        assert run.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert took_s < END_S
    if setting == "cached slow store":
        with begun("exit", setting, tars, tmp_path) as again:
            end_of(again)
            assert again.returncode == 0


@pytest.mark.parametrize("setting", ["threads", "processes", "process", "cached slow store"])
def test_a_script_may_end_without_closing_while_batches_are_made(tars, tmp_path, setting):
    with begun("exit", setting, tars, tmp_path) as run:
        _, errors, took_s = end_of(run)
        assert (run.returncode, errors) == (0, "")
        assert took_s < END_S


@pytest.mark.parametrize("setting", ["threads", "processes"])
def test_an_exception_in_the_users_loop_ends_the_run_with_it(tars, tmp_path, setting):
    with begun("raise", setting, tars, tmp_path) as run:
        _, errors, _ = end_of(run)
        assert run.returncode == 1
        assert errors.rstrip().endswith("ArithmeticError: in the user's loop")
        assert errors.count("Traceback") == 1


@pytest.mark.parametrize("setting", ["stuck store", "processes"])
def test_close_does_not_wait_for_a_store_that_hangs(tars, tmp_path, setting):
    with begun("close", setting, tars, tmp_path) as run:
        out, errors, _ = end_of(run)
        assert (run.returncode, errors) == (0, "")
        assert json.loads(out)["took_s"] < END_S


def test_a_killed_run_leaves_no_process_and_the_next_starts_at_once(tars, tmp_path):
    with begun("train", "processes", tars, tmp_path) as run:
        run.kill()
        end_of(run)
    with DistributedDataLoader(tars, batch_size=16) as loader:
        assert sum(1 for _ in loader) == sum(SIZES) // 16


def test_after_sigkill_of_one_of_two_ranks_nothing_is_left_and_the_epoch_is_resumed(tars):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", SCRIPT]
    with started_process(
        [*launcher, "train", tars, "processes=1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        said = [json.loads(run.stdout.readline()) for _ in range(2)]
        assert said[0]["state"] == said[1]["state"]
        groups = [os.getpgid(rank["process"]) for rank in said]
        assert len({run.pid, *groups}) == 3
        for group in groups:
            look_at_paused(group, 2)
        os.kill(said[0]["process"], signal.SIGKILL)
        assert run.wait(4 * END_S) == 1
        for group in groups:
            assert_group_ends(group)
    with DistributedDataLoader(tars, batch_size=16) as loader:
        loader.load_state_dict(said[1]["state"])
        assert sum(1 for _ in loader) == (sum(SIZES) - 2 * 2 * 16) // 16
