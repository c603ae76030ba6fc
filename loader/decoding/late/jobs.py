"""Work on rows, as a future of its ``RowJob``: it starts once the rows are copied, of which there are three ways.

Rows that lie in no chunk are there at once (``started``). Others are copied by a thread of the pool, those of several
batches together (``start_together``), or by the thread that asks for one of their batches (``start_on_call``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from weakref import ref

from ....storage.threads.interruptible import Future
from ..row_job import RowCrew, RowJob
from ..rows import Rows, complete_all
from .call import Call


def started(job: RowJob) -> Future[RowJob]:
    """Make a job whose rows lie in no chunk."""
    future: Future[RowJob] = Future()
    future.set_result(job)
    return future


def start_on_call(crew: RowCrew, parts: Sequence[Rows], epoch: int) -> list[Call[RowJob]]:
    """Make jobs of successive batches: the rows of all are copied when one is asked for, or its call begun.

    Objects are made under Python's lock, which the training loop needs, too: a thread helps only while the loop is
    elsewhere. It is interrupted nowhere but in the loop's thread, which then closes the pipeline: nobody waits for the
    jobs that are left.
    """
    waiting: list[tuple[ref[Call[RowJob]], Rows]] = []  # no cycle: jobs never asked for release their files at once

    def copy(asked: Rows) -> RowJob:
        since = time.perf_counter()
        others = [(call, rows) for of_call, rows in waiting if (call := of_call()) is not None and call.take()]
        try:
            copied = complete_all([asked, *(rows for _, rows in others)], crew.memory)
            first, *jobs = [RowJob(crew, rows, epoch) for rows in copied]
        except Exception:  # noqa: BLE001 - each job finds out by itself whether it is its own
            for call, rows in others:
                call.make(partial(copy_alone, rows))
            return copy_alone(asked)
        for (call, _), job in zip(others, jobs, strict=True):
            call.set_result(job)
        crew.counters.add(assemble_s=time.perf_counter() - since)
        return first

    def copy_alone(rows: Rows) -> RowJob:
        return RowJob(crew, rows.complete(crew.memory), epoch)

    calls = [Call(partial(copy, rows)) for rows in parts]
    waiting += zip(map(ref, calls), parts, strict=True)
    return calls


def start_together(crew: RowCrew, late: Sequence[tuple[Rows, Future[RowJob]]], epoch: int) -> None:
    """Copy the rows of jobs that are not cancelled, none if the crew is stopped; on a thread of the pool."""
    if crew.is_stopped():
        for _, job in late:
            job.cancel()
    _start(crew, [(rows, job) for rows, job in late if job.set_running_or_notify_cancel()], epoch)


def _start(crew: RowCrew, late: Sequence[tuple[Rows, Future[RowJob]]], epoch: int) -> None:
    """Start job by job, where copying all together fails."""
    since = time.perf_counter()
    try:
        copied = complete_all([rows for rows, _ in late], crew.memory)
    except BaseException as error:  # noqa: BLE001 - raised where the job is asked for
        if len(late) == 1:
            late[0][1].set_exception(error)
            return
        for one in late:
            _start(crew, [one], epoch)
        return
    crew.counters.add(decode_s=time.perf_counter() - since)
    for (_, job), rows in zip(late, copied, strict=True):
        try:
            job.set_result(RowJob(crew, rows, epoch))
        except BaseException as error:  # noqa: BLE001 - as above
            job.set_exception(error)
