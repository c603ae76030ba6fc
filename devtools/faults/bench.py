"""Plays cases on a stage and judges what came of them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader.dataset.index import open_manifest
from penstock.loader.errors import RankStoppedError

from .account import account, longest_gap_s
from .case import LEFT_S, Case, Outcome
from .data import plan_epoch, put_data
from .proxy import FaultProxy
from .stage import Run, Stage, StageError


class Bench:
    """A server with the data set, which cases share, and the speed without faults. One case is played at a time."""

    def __init__(self, options: dict[str, str], folder: Path, seed: int) -> None:
        self.options = options
        self.seed = seed
        self._folder = folder
        bucket = f"penstock-faults-{uuid4().hex[:10]}"
        make_bucket(bucket, options)
        self.url = f"s3://{bucket}/data"
        put_data(self.url, options)
        self._plan_of: tuple[str, Callable[[int], list[Any]]] | None = None
        self._speeds: dict[str, float] = {}

    def plan(self, url: str) -> Callable[[int], list[Any]]:
        """The plan of a data set on the server: a function from an epoch to the sample ids of each global batch."""
        if self._plan_of is None or self._plan_of[0] != url:
            manifest = open_manifest(url, storage_options=self.options, progress=False)
            planned = lru_cache(maxsize=4)(lambda epoch: [ids.tolist() for ids in plan_epoch(manifest, epoch)])
            self._plan_of = url, planned
        return self._plan_of[1]

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with FaultProxy(self.options["endpoint"]) as proxy:
            stage = Stage(proxy=proxy, url=self.url, direct=self.options, folder=folder, seed=self.seed)
            try:
                yield stage
            finally:
                stage.close()

    def play(self, case: Case) -> Outcome:
        """Play a case and judge it."""
        outcome = Outcome(name=case.name, group=case.group, fault=case.fault, sees=case.sees, skipped=case.skip())
        if outcome.skipped:
            return outcome
        started = time.monotonic()
        with self.stage(case.name) as stage:
            try:
                self._play(case, stage, outcome)
            except (StageError, OSError, subprocess.SubprocessError) as exc:
                outcome.failures.append(f"the bench failed: {type(exc).__name__}: {exc}")
            self._judge(case, stage, outcome)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _play(self, case: Case, stage: Stage, outcome: Outcome) -> None:
        how = {"torchrun": case.torchrun, **case.job, **case.prepare(stage)}
        stage.start(case.ranks, **how)
        case.inject(stage)
        if not stage.run.join(case.timeout_s):
            outcome.failures.append(f"it was not over within {case.timeout_s:.0f} s")
        outcome.ended = self._note_end(case, stage, outcome)
        if outcome.ended == "finished":
            self._note_speed(case, stage, outcome)
            return
        stage.proxy.choose(None)
        stage.proxy.resume()
        ranks = case.then_ranks or case.ranks
        usual = {name: value for name, value in how.items() if name in {"torchrun", "meets"}}
        healed = stage.start(ranks, **usual)
        if not healed.join(case.timeout_s) or not _is_done(healed):
            outcome.failures.append(f"it did not go on without the fault: {_error_of(healed) or healed.tail()}")

    def _note_end(self, case: Case, stage: Stage, outcome: Outcome) -> str:
        run = stage.run
        if _is_done(run):
            return "finished"
        errors = [line for rank in range(run.ranks) for line in run.lines(rank) if line["kind"] == "error"]
        if not errors:
            return "killed"
        causes = [line for line in errors if line["error"] != RankStoppedError.__name__] or errors
        first = min(causes, key=lambda line: float(line["t"]))
        outcome.error, outcome.message = first["error"], first["message"]
        if case.reaches_all and not all(outcome.message in _error_of(run, rank) for rank in range(run.ranks)):
            outcome.failures.append("not every rank named the first cause")
        if stage.began_at is None:
            outcome.error_s = float(first["waited_s"])
        else:
            outcome.error_s = max(line["t"] for line in errors) - stage.began_at
        return "error"

    def _note_speed(self, case: Case, stage: Stage, outcome: Outcome) -> None:
        """The speed as a share of that without a fault."""
        times = [line["t"] for line in stage.run.lines(0) if line["kind"] == "batch"]
        if len(times) < 2:
            return
        speed = (len(times) - 1) / (times[-1] - times[0])
        if case.group == "none":
            self._speeds[case.name] = speed
        usual = self._speeds.get(case.usual)
        outcome.share_of_speed = None if usual is None else speed / usual

    def _judge(self, case: Case, stage: Stage, outcome: Outcome) -> None:
        outcome.attempts = len(stage.runs)
        attempts = stage.attempts()
        found = account(attempts, self.plan(stage.url))
        for name in ("delivered", "missing", "repeated", "wrong", "misplaced", "replayed"):
            setattr(outcome, name, getattr(found, name))
        outcome.gap_s = longest_gap_s(attempts[:1])
        _note_what_is_left(stage.runs, outcome)
        outcome.failures += list(_list_failures(case, outcome))
        outcome.failures += [
            f"the job beside it did not finish: {_error_of(run) or run.tail()}"
            for run in stage.beside
            if not run.join(case.timeout_s) or not _is_done(run)
        ]
        wrong_beside = sum(len(line["wrong"]) for run in stage.beside for line in run.lines(0) if "wrong" in line)
        if wrong_beside:
            outcome.failures.append(f"the job beside it got {wrong_beside} wrong samples")


def _note_what_is_left(runs: Sequence[Run], outcome: Outcome) -> None:
    for run in runs:
        for rank in range(run.ranks):
            for line in run.lines(rank):
                if line["kind"] == "end":
                    outcome.threads_left = max(outcome.threads_left, line["left"]["own_threads"])
                    outcome.descriptors_left = max(outcome.descriptors_left, line["left"]["descriptors"])
                    outcome.gone_s = max(outcome.gone_s, line["gone_s"])
                for name, count in line.get("counts", {}).items() if line["kind"] in {"done", "error"} else ():
                    setattr(outcome, name, getattr(outcome, name) + count)


def _list_failures(case: Case, outcome: Outcome) -> Iterator[str]:
    """The limits that did not hold."""
    for name in ("missing", "repeated", "wrong", "misplaced"):
        if count := getattr(outcome, name):
            yield f"{count} {'batches' if name == 'misplaced' else 'samples'} {name}"
    if not outcome.delivered:
        yield "nothing was delivered"
    expected = "killed" if case.errors == ("killed",) else "error" if case.errors else "finished"
    if outcome.ended != expected:
        yield f"it ended as {outcome.ended} {outcome.error}, not as {expected}: {outcome.message[:300]}"
    elif expected == "error":
        if outcome.error not in case.errors:
            yield f"{outcome.error} was raised, not {' or '.join(case.errors)}: {outcome.message[:300]}"
        if case.names not in outcome.message:
            yield f"the message does not name {case.names!r}: {outcome.message[:300]}"
        if outcome.error_s is not None and outcome.error_s > case.error_s:
            yield f"the error came after {outcome.error_s:.0f} s; the limit is {case.error_s:.0f} s"
    if outcome.gap_s > case.gap_s:
        yield f"{outcome.gap_s:.0f} s without a batch; the limit is {case.gap_s:.0f} s"
    if outcome.threads_left > 0:
        yield f"{outcome.threads_left} threads were left {LEFT_S:.0f} s after close()"
    if outcome.descriptors_left > 0:
        yield f"{outcome.descriptors_left} descriptors were left {LEFT_S:.0f} s after close()"


def _is_done(run: Run) -> bool:
    return all(any(line["kind"] == "done" for line in run.lines(rank)) for rank in range(run.ranks))


def _error_of(run: Run, rank: int | None = None) -> str:
    ranks = range(run.ranks) if rank is None else [rank]
    errors = [line for each in ranks for line in run.lines(each) if line["kind"] == "error"]
    return f"{errors[0]['error']}: {errors[0]['message'][:1000]}" if errors else ""


@contextmanager
def open_bench(folder: Path, seed: int) -> Iterator[Bench]:
    """A bench on a real server, whose stages are below ``folder``."""
    with serve_s3(plain_http=True) as options:
        yield Bench(options, folder, seed)


Report = Callable[[Outcome], None]
