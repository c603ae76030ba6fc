"""A Ray cluster to work on: one that runs already, or one of this machine that ends with the process.

Ray is an extra, and takes a second to import; that happens here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .errors import ClusterError, PenstockError

HERE = "here"
"""In place of an address: a new cluster on this machine, for as long as the work takes."""
_CONNECT_S = 5.0
_STARTS = 3
_TRIES = 3  # of a task whose process or node died
_STORE_BYTES = 512 << 20
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns of a change to come, at each start of a worker
    "RAY_DEDUP_LOGS": "1",
}


def import_ray() -> Any:
    """Import Ray.

    Raises:
        ClusterError: it is not installed.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError as exc:
        raise ClusterError(
            f"Ray cannot be imported ({exc}); install it with `pip install penstock[ray]`, on every node"
        ) from exc
    return ray


@contextmanager
def open_cluster(address: str, *, cpus: int, namespace: str | None = None) -> Iterator[Any]:
    """Yield Ray, connected to the cluster at ``address`` (``host:port`` or ``auto``), or to a new one here (``HERE``).

    A new one has ``cpus`` slots, whatever the machine has, and 512 MiB of shared memory; it ends with the
    block, and its files are deleted. Signals are handled as before. For the main thread.

    Raises:
        ClusterError: Ray is not installed, or no cluster is there.
    """
    ray = import_ray()
    if ray.is_initialized():
        raise ClusterError("this process is connected to a Ray cluster already; disconnect it first (ray.shutdown)")
    folder = None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == HERE:
            folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
            options |= {
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": folder,
            }
        else:
            _check_reachable(address)
            options["address"] = address
        try:
            _connect(ray, options, tries=_STARTS if address == HERE else 1)
        except Exception as exc:  # Ray raises ConnectionError, RuntimeError, ValueError and its own
            where = "a new cluster here" if address == HERE else f"the cluster at {address}"
            raise ClusterError(
                f"Ray does not reach {where}: {type(exc).__name__}: {exc}; if the cluster asks for a token, set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            ) from exc
        for number, handler in handlers.items():  # Ray has set its own
            signal.signal(number, handler)
        yield ray
    finally:
        with suppress(Exception):  # what is not there any more cannot be left
            ray.shutdown()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def make_task(ray: Any, function: Any) -> tuple[Any, int]:
    """Make a function a task of one CPU, tried again if its process dies; and how many to have under way at a time."""
    ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) + 2
    return ray.remote(num_cpus=1, max_retries=_TRIES)(function), ahead


def wait_for_task(ray: Any, done: Any, error: type[PenstockError]) -> Any:
    """Wait for the result of a task.

    Raises:
        PenstockError: what the task raised; ``error`` if that was something else, or its processes died, several in a
            row.
    """
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, PenstockError):
            raise exc.cause from exc
        raise error(f"a task on the Ray cluster failed: {exc.cause!r}; is penstock installed on every node?") from exc
    except ray.exceptions.RayError as exc:
        raise error(
            f"the Ray cluster lost a part of the work {_TRIES} times ({type(exc).__name__}): its processes end, "
            "perhaps for want of memory; run the same command again to go on"
        ) from exc


def _connect(ray: Any, options: dict[str, Any], *, tries: int) -> None:
    """Connect, or start a cluster; on a busy machine Ray gives up after seconds, for which its agents take too long."""
    for left in reversed(range(tries)):
        try:
            ray.init(**options)
        except Exception:
            with suppress(Exception):
                ray.shutdown()
            if not left:
                raise
        else:
            return


def _check_reachable(address: str) -> None:
    """Say at once that nobody listens at an address: Ray itself tries for minutes.

    Raises:
        ClusterError: nobody does, or it is no address.
    """
    if address == "auto":
        return
    found = re.fullmatch(r"(.+):(\d{1,5})", address)
    if found is None or "://" in address:
        raise ClusterError(
            f"--address {address}: write it as host:port, that of `ray start --head` (6379 by default), or auto; to "
            "start from outside the cluster, give this command to `ray job submit`"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise ClusterError(
            f"no Ray cluster is reachable at {address}: {exc}; start one with `ray start --head`, or leave out "
            "--address to use one on this machine"
        ) from exc
