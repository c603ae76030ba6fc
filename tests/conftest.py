"""What tests of every room share: the three tiers, a real S3 server."""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from uuid import uuid4
from zlib import crc32

import pytest
from hypothesis import settings
from missing_server import skip_or_fail_in_ci
from started_threads import begin_test

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker: torch's threads on busy cores wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore what the keyboard sends, and nohup the end of a
# terminal; so would the processes that they start.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Shared machines stall now and then: an example is judged by its result, a hanging test by its time-out.
settings.register_profile("penstock", deadline=None)
QUICK_EXAMPLES, LONG_LIST = 10, 4
settings.register_profile("quick", deadline=None, max_examples=QUICK_EXAMPLES)
settings.load_profile("penstock")

# What makes a test slow: a server, ranks of its own, a kill, in the test or in a function of its file that it calls.
# One that takes a second, or a tenth of a second of a core, is marked by hand. `make quick` leaves slow tests out;
# `make test` runs them last, four at a time, since many of them wait, and leaves those marked
# full to `make full`: soaks, kills at every point, and of slow products of parameters two cases in three.
SLOW_FIXTURES = {"s3_endpoint", "nginx_url", "python_url", "ranks_folder"}
SLOW_PARAMETERS = re.compile(r"nginx|http \(|python_url")
SLOW_CALLS = {"Ranks", "run_ranks", "start_ranks", "start_demo", "started_process", "kill", "killpg"}
SLOW_FILES = {
    "test_endings.py",
    "test_examples.py",
    "test_memory.py",
    "test_nodes.py",
    "test_processes.py",
    "test_restarts.py",
    "test_stall.py",
}
# Files whose few tests take a minute or more: begun first, so that no worker waits for one at the end. Tests of stalls
# and of the watchdog mostly wait for time-outs: apart, so that the other worker has the cores meanwhile.
LONG_FILES = (
    "test_stall.py",
    "test_long_phases.py",
    "test_nodes.py",
    "test_continuation.py",
    "test_restarts.py",
    "test_watchdog.py",
    "test_slurm.py",
    "test_bench.py",
    "test_demo.py",
    "test_memory.py",
    "test_simulation_bench.py",
    "test_integration_examples.py",
    "test_bucket_s3.py",
    "test_interrupts.py",
    "test_filter_kills.py",
    "test_gpu_bench.py",
)


def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores that this process may use: now and then a test waits.

    xdist itself counts the cores of the machine.
    """
    cores = len(os.sched_getaffinity(0))
    return cores + (cores + 1) // 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_quick = config.getoption("--hypothesis-profile") == "quick"
    left_out = set(find_left_out(items, long_list=LONG_LIST if is_quick else None))
    for item in items:
        if is_quick and isinstance(item, pytest.Function):
            take_few_examples(item.function)
        if is_slow(item) or item.get_closest_marker("full"):
            item.add_marker(pytest.mark.slow)
        if item in left_out and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.full)
        elif item in left_out and is_quick:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))


def pytest_collection_finish() -> None:
    """Keep what was imported out of the garbage collector's sight: several tests ask it to look at all there is.

    torch's loggers hand on to the root's: else pytest adds its handlers to each and removes them, six times a test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()


def take_few_examples(function: Any) -> None:
    """Bound the examples of a property that states a number of its own, which a profile does not change."""
    own = getattr(function, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > QUICK_EXAMPLES:
        function._hypothesis_internal_use_settings = settings(own, max_examples=QUICK_EXAMPLES)


def find_left_out(items: list[pytest.Item], *, long_list: int | None = None) -> Iterator[pytest.Item]:
    """Find the cases that `make quick` leaves out, and of slow tests `make test`: products are taken in part.

    These are of ``sampled(n)`` all but each n-th, of products two in three, and so of lists of ``long_list`` or more.

    Of a product of parameters it takes the cases whose indices add up to a multiple of n, so that each value is in one.
    """
    places = {item: places_of(item) for item in items if isinstance(item, pytest.Function)}
    sizes: dict[tuple[Path, str], list[int]] = {}
    for item, at in places.items():
        known = sizes.setdefault((item.path, item.originalname), [0] * len(at))
        known[:] = [max(size, index + 1) for size, index in zip(known, at, strict=True)]
    for item, at in places.items():
        marker = item.get_closest_marker("sampled")
        second = sorted(sizes[item.path, item.originalname])[-2:-1]
        is_long = long_list is not None and len(at) == 1 and sizes[item.path, item.originalname][0] >= long_list
        every = marker.args[0] if marker else min(3, *second) if second else 3 if is_long else 1
        if sum(at) % every:
            yield item


def places_of(item: pytest.Function) -> list[int]:
    """The indices of a case's values in the lists of its ``parametrize`` marks, or else of its fixtures.

    Those of a fixture are counted from another one for each test, so that all stores or formats have their turn.
    """
    if not hasattr(item, "callspec"):
        return []
    lists = (mark.args[0] for mark in item.iter_markers("parametrize"))
    firsts = [names.split(",")[0].strip() if isinstance(names, str) else names[0] for names in lists]
    found = [item.callspec.indices[name] for name in firsts]
    return found or [index + crc32(item.originalname.encode()) % 3 for index in item.callspec.indices.values()]


def is_slow(item: pytest.Item) -> bool:
    """Whether a test starts a server or ranks, or kills a process: by its fixtures, parameters, calls or file."""
    if not isinstance(item, pytest.Function):
        return False
    parameters = item.callspec.id if hasattr(item, "callspec") else ""
    return bool(
        item.path.name in SLOW_FILES
        or SLOW_FIXTURES & set(item.fixturenames)
        or SLOW_CALLS & called_by(item.function)
        or SLOW_PARAMETERS.search(parameters)
        or item.get_closest_marker("s3")
    )


@functools.cache
def called_by(function: FunctionType) -> set[str]:
    """The names that a test uses, and those that the functions of its file use which it calls."""
    names = set(names_in(function.__code__))
    for name in tuple(names):
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__ == function.__module__:
            names |= set(names_in(called.__code__))
    return names


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function's code uses, those of comprehensions and functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Note which threads there are, for tests that look at those they started."""
    begin_test()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_synced() -> Iterator[None]:
    """No test cuts the power: what the tests' own process writes need not reach the disk, for which it would wait."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)  # which refuses a closed file, too
        yield


_imported_when_frozen = 0


@pytest.fixture
def settled_imports() -> None:
    """Keep what is imported out of the garbage collector's sight, for tests that collect each time they end.

    Else most of such a test's time goes to torch's hundreds of thousands of objects. Tests import more as they go.
    """
    global _imported_when_frozen
    importlib.import_module("torch._dynamo")
    if len(sys.modules) != _imported_when_frozen:
        gc.collect()
        gc.freeze()
        _imported_when_frozen = len(sys.modules)


S3_SERVER = Path(__file__).parent / "servers" / "s3_server.sh"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run of pytest share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time do what ``path`` names."""
    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def s3_endpoint(run_folder: Path) -> Iterator[dict[str, Any]]:
    """The storage_options of a real S3 server: the one that the environment names, or one started for this session."""
    given = os.environ.get("PENSTOCK_TEST_S3_ENDPOINT")
    if given:
        yield {
            "endpoint": given,
            "access_key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
        return
    if not shutil.which("radosgw"):
        reason = (
            f"no S3 server: run `{S3_SERVER.name} install` in tests/servers as root on Debian, or set "
            "PENSTOCK_TEST_S3_ENDPOINT, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        skip_or_fail_in_ci(reason)
    with serve_s3_to_all_workers(run_folder) as endpoint:
        yield {"endpoint": endpoint, "access_key": "test", "secret_key": "testsecret"}


@contextmanager
def serve_s3_to_all_workers(run_folder: Path) -> Iterator[str]:
    """The endpoint of a server that the first worker of this run starts, and the last one to leave stops.

    Each holds a lock of the kernel's, so that one that died is not waited for.
    """
    with (run_folder / "s3-users").open("a") as users:
        with locked(run_folder / "s3"):
            place = run_folder / "s3-folder"
            if not place.exists():
                # A short path: the daemons' sockets may not have long names.
                place.write_text(tempfile.mkdtemp(prefix="penstock-s3-"))
            fcntl.flock(users, fcntl.LOCK_SH)
            folder = place.read_text()
            command = [S3_SERVER, "start", folder]  # where one runs, this tells its endpoint
            started = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=120)
        try:
            if started.returncode:
                pytest.fail(f"{S3_SERVER} did not start a server; its messages are above")
            yield started.stdout.strip()
        finally:
            with locked(run_folder / "s3"), suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run([S3_SERVER, "stop", folder], timeout=60, check=False)
                shutil.rmtree(folder, ignore_errors=True)
                place.unlink()


@pytest.fixture
def s3_url(s3_endpoint: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the URL of a new, empty bucket, its storage_options)."""
    from penstock.benchmarks.stores.server import make_bucket

    name = f"penstock-{uuid4().hex[:12]}"
    make_bucket(name, s3_endpoint)
    return f"s3://{name}", dict(s3_endpoint)
