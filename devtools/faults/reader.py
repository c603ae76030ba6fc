"""One rank of a job under faults: reads, checks each sample, and tells of each batch.

python -m devtools.faults.reader JOB.json     (also under torchrun)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.benchmarks.child_arguments import take_arguments
from penstock.loader.data_loader import DistributedDataLoader
from penstock.storage.memory.libc import count_allocated_bytes
from penstock.storage.retrying.retry import RetryStore

from .case import KEPT_DESCRIPTORS, LEFT_S
from .data import GLOBAL_BATCH, ORDER, digest_of, make_digests
from .job import Job

TELL_EVERY_S = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class AloneError(Exception):
    """The other ranks cannot be met any more."""


class Log:
    """Lines of JSON with the time; every line is one write."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps({"t": time.monotonic(), **what}).encode() + b"\n")


def identity(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform, so that worker processes have work."""
    return sample


def look_at_process() -> dict[str, int]:
    """Measure this process: resident bytes and those that malloc gave out, threads, descriptors.

    ``threads`` leaves out those that fetch: their number is tuned at run time, and rises while a server fails.
    """
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    own = [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]
    fetching = sum(thread.name.startswith("penstock-fetch") for thread in own)
    return {
        "rss": resident,
        "allocated": count_allocated_bytes(),
        "threads": len(list(Path("/proc/self/task").iterdir())) - fetching,
        "own_threads": len(own),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


class Reader:
    """Loop of one rank. Mutable state: the batches since, and when it last logged its process."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._log = Log(job.log_of(rank))
        self._digests = make_digests(job.samples, job.sample_bytes)
        self._batches = 0
        self._reported_at = float("-inf")

    def run(self) -> int:
        job = self._job
        if job.group or job.meets:
            dist.init_process_group("gloo")
        if job.direct:
            self._warm_up()
        if job.user:
            os.setgid(job.user)
            os.setuid(job.user)
        before = look_at_process()
        self._log.tell(kind="start", pid=os.getpid(), world_size=self._world_size, **before)
        asked_at = time.monotonic()
        loader = None
        code = 0
        try:
            loader = self._open({**job.options, **job.options_of_rank.get(str(self._rank), {})}, **job.loader)
            if job.spend_hedges:
                retrying = find_retries(loader)
                assert retrying is not None
                retrying._budget.sent += 1_000_000
            if job.state is not None:
                loader.load_state_dict(job.state)
            self._log.tell(kind="open", state=loader.state_dict())
            self._read(loader)
            self._log.tell(kind="done", counts=count_requests(loader), metrics=asdict(loader.metrics()))
        except AloneError as exc:
            code = 4
            self._log.tell(kind="alone", message=str(exc))
        except Exception as exc:  # noqa: BLE001 - how it fails is what the bench asks
            code = 3
            self._log.tell(
                kind="error",
                error=type(exc).__name__,
                message=str(exc),
                notes=getattr(exc, "__notes__", []),
                waited_s=time.monotonic() - asked_at,
                counts={} if loader is None else count_requests(loader),
                trace=traceback.format_exc()[-2000:],
            )
        finally:
            if loader is not None:
                loader.close()
        del loader
        self._wait_until_gone(before)
        if dist.is_initialized() and code == 0:
            dist.barrier()
            dist.destroy_process_group()
        return code

    def _open(self, options: dict[str, Any], **more: Any) -> DistributedDataLoader[dict[str, Any]]:
        given: dict[str, Any] = {
            "global_batch_size": GLOBAL_BATCH,
            "seed": ORDER.seed,
            "lanes": ORDER.lanes,
            "window": ORDER.window,
            "piece": ORDER.piece,
            "decode": None,
            "last_batch": "partial",
            "with_ids": True,
            "memory_limit": "12MiB",
            "threads": 2,
            "rank": self._rank,
            "world_size": self._world_size,
            "storage_options": options,
        } | more
        if given.get("processes"):
            given["transform"] = identity
        return DistributedDataLoader(self._job.url, **given)

    def _warm_up(self) -> None:
        """Create what a process keeps for ever, such as the threads of libraries, before anything is measured."""
        with self._open(dict(self._job.direct)) as loader:
            next(iter(loader))

    def _read(self, loader: DistributedDataLoader[dict[str, Any]]) -> None:
        job = self._job
        while True:
            for batch in loader:
                ids = batch["__id__"].tolist()
                wrong = [i for i, value in zip(ids, batch["bin"], strict=True) if digest_of(value) != self._digests[i]]
                epoch, stop = position_of(loader)
                self._log.tell(kind="batch", epoch=epoch, stop=stop, ids=ids, wrong=wrong)
                self._batches += 1
                if self._batches == 10 and job.clock_jump_s:
                    jump_clock(job.clock_jump_s)
                if time.monotonic() - self._reported_at > TELL_EVERY_S:
                    self._reported_at = time.monotonic()
                    self._log.tell(kind="process", **look_at_process(), counts=count_requests(loader))
                time.sleep(job.pace_s)
                if self._meet():
                    return
            if loader.epoch >= job.until_epoch:
                return

    def _meet(self) -> bool:
        """Meet the other ranks, and return whether all stop after this batch."""
        asked = Path(self._job.folder, "stop").exists() and self._rank == 0
        if not self._job.meets:
            return asked
        flag = torch.tensor([int(asked)])
        try:
            dist.all_reduce(flag)
        except RuntimeError as exc:  # another rank is gone
            raise AloneError(str(exc).splitlines()[0]) from exc
        return bool(flag.item())

    def _wait_until_gone(self, before: dict[str, int]) -> None:
        """Log what remains after ``close``, at once and when all is as before."""
        closed_at = time.monotonic()
        first = look_at_process()
        while True:
            left = look_at_process()
            took_s = time.monotonic() - closed_at
            gone = (
                left["own_threads"] <= before["own_threads"]
                and left["descriptors"] <= before["descriptors"] + KEPT_DESCRIPTORS
            )
            if gone or took_s > LEFT_S:
                break
            time.sleep(0.1)
        more = {name: left[name] - before[name] for name in ("own_threads", "threads", "descriptors")}
        more["descriptors"] = max(0, more["descriptors"] - KEPT_DESCRIPTORS)
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("penstock"))
        self._log.tell(kind="end", left=more, left_at_once=first, gone_s=took_s, names=names[:20])


def position_of(loader: DistributedDataLoader[Any]) -> tuple[int, int]:
    """The epoch of the last batch, and how many of its samples are consumed."""
    state = loader.state_dict()
    epoch, consumed = int(state["epoch"]), int(state["consumed"])
    return (epoch, consumed) if consumed else (epoch - 1, int(state["num_samples"]))


def jump_clock(seconds: float) -> None:
    """Set Python's wall clock of this process forth or back; clocks of libraries in C and Rust stay."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 1e9)


def find_retries(loader: DistributedDataLoader[Any]) -> RetryStore | None:
    """The store that retries, under a cache or alone; None for a store without one."""
    sources = loader._resources.sources
    store: object = None if sources is None else sources.stores[0]
    while store is not None and not isinstance(store, RetryStore):
        store = getattr(store, "_inner", None)
    return store


def count_requests(loader: DistributedDataLoader[Any]) -> dict[str, int]:
    """Requests, retries and second requests so far, those of the loader's process too."""
    counts = loader._resources.count_store()
    return {name: getattr(counts, name) for name in ("requests", "retries", "hedges", "hedges_won")}


def main() -> int:
    path = Path(*take_arguments("JOB.json", "python -m devtools faults"))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    job = Job.from_json(path.read_text())
    return Reader(job, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))).run()


if __name__ == "__main__":
    sys.exit(main())
