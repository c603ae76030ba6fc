"""Spread the transformation of samples over a Ray cluster. Reading, cutting and writing stay here, so the bytes do."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from os import cpu_count
from typing import Any

from ...loader.errors import ConfigError, WorkerError
from ...storage.ray_cluster import make_task, open_cluster, wait_for_task

Part = tuple[int, int, int, Any]
Work = Callable[[Any, int], Any]


def in_cluster(parts: Iterator[Part], transform: Work, cluster: str) -> Iterator[Part]:
    """Transform (piece, number, ordinal of the first item, items) by tasks; yields (piece, number, rows, items).

    The order stays. ``cluster`` is as of ``open_cluster``.

    Raises:
        ClusterError: Ray is not installed, or no cluster is there.
        ConfigError: the functions cannot be sent to it.
        WorkerError: the processes that had a part died, several in a row.
    """
    with open_cluster(cluster, cpus=max(2, cpu_count() or 1)) as ray:
        _take_along(ray, getattr(transform, "function", None))
        try:
            held = ray.put(transform)
        except Exception as exc:
            raise ConfigError(f"the functions given as map= and tokenizer= cannot be sent to Ray: {exc}") from exc
        work, ahead = make_task(ray, _work)
        running: deque[tuple[int, int, int, Any]] = deque()

        def take() -> Part:
            piece, number, rows, done = running.popleft()
            return piece, number, rows, wait_for_task(ray, done, WorkerError)

        for piece, number, ordinal, items in parts:
            if len(running) >= ahead:
                yield take()
            running.append((piece, number, len(items), work.remote(held, items, ordinal)))
        while running:
            yield take()


def _take_along(ray: Any, function: Any) -> None:
    """Have the module of a user's function travel with it, unless it is installed: the nodes have no copy of it."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = getattr(module, "__file__", None) or ""
    if path and "site-packages" not in path and not module.__name__.startswith("penstock."):  # type: ignore[union-attr]
        ray.cloudpickle.register_pickle_by_value(module)


def _work(transform: Work, items: Any, first: int) -> Any:
    return transform(items, first)
