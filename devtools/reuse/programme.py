"""One user's programme, drawn at random: what is kept of a loader's batches, changed and dropped, and when."""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.loader import DistributedDataLoader

from .held import RUINED, Held, Tally, WrongValueError, count_bytes, delivered, differs, ruin, wanted_of
from .keepers import keep_some
from .settings import Settings

_HELD = 120
_LOOKS = 5  # at what is held, with each batch
_EVENTS = ("replace", "begin again", "another epoch", "fork", "interrupt", "samples by id", "collect", "collect")
_COUNTED = (
    "requests", "retries", "hedges", "hedges_won", "fetched_chunks", "refetched_chunks", "evicted_chunks",
)  # fmt: skip
_FORKED_S = 60

Loader = DistributedDataLoader[Any]


class Programme:
    """Mutable state: what is held, what was overwritten, and the children that look at what they got at their fork."""

    def __init__(self, settings: Settings, draw: random.Random, tally: Tally) -> None:
        self._settings, self._draw, self._tally = settings, draw, tally
        self._held: list[Held] = []
        self._ruined: list[torch.Tensor] = []
        self._children: list[int] = []
        self._dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run(self, until: float) -> None:
        """Loader after loader, each some batches long, until ``time.monotonic()`` reaches ``until``.

        Raises:
            WrongValueError: a value is not what it must be. And whatever the loader raises.
        """
        if self._draw.random() < 0.2:
            gc.disable()
        try:
            with self._dropping():
                for _ in range(self._draw.randrange(1, 4)):
                    if time.monotonic() < until:
                        self._use_loader(until)
                        self._look(len(self._held))
                self._look_at_inputs()
        finally:
            gc.enable()
            self._join_children()
        self._tally.programmes += 1

    def _use_loader(self, until: float) -> None:
        loader, left = self._settings.open(), self._draw.choice([20, 60, 200])
        iterator = iter(loader)
        try:
            while left and time.monotonic() < until:
                left -= 1
                batch = next(iterator, None)
                if batch is None:
                    iterator = iter(loader)
                    continue
                self._take(batch)
                del batch
                if self._draw.random() < 0.08:
                    loader, iterator = self._pass_event(self._draw.choice(_EVENTS), loader, iterator)
        finally:
            totals = loader.metrics()
            for name in _COUNTED:
                self._tally.events[name] = self._tally.events.get(name, 0) + getattr(totals, name)
            if self._draw.random() < 0.7:  # else it ends with its last reference
                loader.close()

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _take(self, batch: dict[str, Any]) -> None:
        """Compare all of a batch, keep or overwrite some of it, and look at some of what is held."""
        ids = batch["__id__"].tolist()
        self._tally.batches += 1
        fields = {name: of for name, of in batch.items() if name == "__key__" or not name.startswith("__")}
        for name, values in fields.items() if ids else ():
            self._compare(name, ids, values)
        for name, values in fields.items() if ids else ():
            chance = self._draw.random()
            if chance < 0.25:
                kept = keep_some(values, self._draw)
                self._held.append(Held(name, ids, kept, self._settings.value))
                self._tally.ways.add(f"{type(values).__name__} as {type(kept.value).__name__}")
            elif chance < 0.5:
                if chance < 0.3 and isinstance(values, torch.Tensor) and values.is_contiguous():
                    self._ruined.append(values)
                ruin(values)
        self._look(_LOOKS)
        while len(self._held) > self._draw.randrange(10, _HELD):
            held = self._held.pop(self._draw.randrange(len(self._held)))
            if self._draw.random() < 0.5:
                self._dropped.put(held)
        del self._ruined[:-4]

    def _compare(self, name: str, ids: list[int], values: Any) -> None:
        wanted, found = wanted_of(name, ids, self._settings.value), delivered(values)
        if differs(found, wanted):
            wrong = [i for i, a, b in zip(ids, found, wanted, strict=False) if differs(a, b)]
            raise WrongValueError(f"{name} of {len(wrong)} of {len(ids)} samples, {wrong[:8]}, is not theirs")
        self._tally.values += len(ids)
        self._tally.nbytes += count_bytes(wanted)

    def _look(self, count: int) -> None:
        """Look at some of what is held."""
        for held in self._draw.sample(self._held, min(count, len(self._held))):
            self._tally.nbytes += held.check()
            self._tally.looks += 1
        if any(bool((tensor.view(torch.uint8) != RUINED).any()) for tensor in self._ruined):
            raise WrongValueError("something else was written into a batch that its owner had overwritten")

    def _look_at_inputs(self) -> None:
        """Compare what a transform kept of what it was given."""
        for sample in self._settings.kept_inputs:
            sample_id = self._settings.known.find(sample)
            for name, value in sample.items():
                if differs(value, self._settings.stored(name, sample_id)):
                    raise WrongValueError(f"{name} of sample {sample_id}, which a transform kept, has changed")
            self._tally.looks += 1

    # -- what happens on the way --------------------------------------------------------------------------------------

    def _pass_event(self, event: str, loader: Loader, iterator: Iterator[Any]) -> tuple[Loader, Iterator[Any]]:
        if event == "replace":
            loader = self._resume(loader)
        elif event == "another epoch" and self._settings.kind != "mixture":
            loader.set_epoch(self._draw.randrange(5))
        elif event == "interrupt":
            self._interrupt(iterator)
        elif event == "fork" and "processes" not in self._settings.arguments:
            self._fork()
            return loader, iterator
        elif event == "samples by id" and self._settings.kind in ("plain", "in place"):
            self._look_at_samples(loader)
            return loader, iterator
        elif event == "collect":
            gc.collect()
            return loader, iterator
        return loader, iter(loader)

    def _resume(self, loader: Loader) -> Loader:
        """Go on with another loader, which is opened before or after this one is closed."""
        state, is_first = loader.state_dict(), self._draw.random() < 0.5
        if is_first:
            loader.close()
        other = self._settings.open()
        other.load_state_dict(state)
        loader.close()
        return other

    def _interrupt(self, iterator: Iterator[Any]) -> None:
        """Ctrl-C at some moment while batches are taken and dropped."""

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.01 * self._draw.random())
            while next(iterator, None) is not None:
                pass
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _fork(self) -> None:
        """Have a child check all that is held while this process releases half of it and continues."""
        self._join_children()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(_FORKED_S)
                time.sleep(0.05)
                for held in self._held:
                    if not isinstance(held.kept.value, tuple):  # torch's autograd has threads, which are not here
                        held.check()
                code = 0
            finally:
                os._exit(code)
        self._children.append(child)
        for held in self._held[::2]:
            self._dropped.put(held)
        del self._held[::2]

    def _join_children(self) -> None:
        while self._children:
            if os.waitstatus_to_exitcode(os.waitpid(self._children.pop(), 0)[1]):
                raise WrongValueError("a forked child saw what it held change")

    def _look_at_samples(self, loader: Loader) -> None:
        """Samples by their ids: each twice, and changed in between."""
        for sample_id in 2 * [self._draw.randrange(self._settings.known.samples)]:
            for name, value in loader.dataset[sample_id].items():
                if not name.startswith("__") and isinstance(value, np.ndarray | list | dict):
                    if differs(value, self._settings.value(name, sample_id)):
                        raise WrongValueError(f"{name} of sample {sample_id}, taken by its id, is not its own")
                    ruin([value])
        loader.peek()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Release the values in another thread."""

        def drop() -> None:
            while self._dropped.get() is not None:
                pass

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._dropped.put(None)
            thread.join()
