"""A worker's exchange with its servers: pushes and pulls on a thread of their own, while the worker computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...storage.threads.interruptible import Condition, Thread
from ..server.client import ServerClient
from ..server.embedding import ServerEmbedding

Rows = Mapping[str, tuple[NDArray[np.int64], Tensor]]
_REST_S = 1.0  # without a step after which shards hear the clock again: one may have come back from the past


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """A push of a step: the gradients of a batch's mean loss, and by table ids (n,) and their rows (n, width).

    Nobody writes to any of them any more.
    """

    tensors: Mapping[str, Tensor]
    rows: Rows = field(default_factory=dict)
    weight: float
    rate: float
    unit: int


class Exchange:
    """Pushes a step's gradients and pulls what the next one computes with.

    With ``is_ahead`` a step computes while the exchange of the one before it is under way, so that it lacks what its
    own worker pushed last; policies count this step in. Otherwise ``exchange`` waits, and rows of the next batch are
    read while this one is computed: ``exchange`` gets anew those that pushes have made stale.
    The client is used under one lock: by the thread within an exchange, by the caller outside of one.

    All mutable state: the exchange under way, the rows that it pulled and those to read ahead, the batches that are
    pushed and may still be lost, those that cannot and were not told yet, an error, and whether this is closed.
    """

    def __init__(self, client: ServerClient, tables: Mapping[str, ServerEmbedding], *, is_ahead: bool) -> None:
        self.client, self.is_ahead = client, is_ahead
        client.reads_ahead = int(is_ahead)
        self._tables = tables
        self._lock = threading.Lock()
        self._changed = Condition()
        self._work: tuple[Gradients, Mapping[str, NDArray[np.int64]]] | None = None
        self._wanted: Mapping[str, NDArray[np.int64]] = {}
        self._rows: dict[str, tuple[NDArray[np.int64], Tensor]] = {}
        self._uncounted: set[int] = set()
        self._counted: list[int] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._run, name="exchange")
        self._thread.start()
        for table in tables.values():
            table.bind(self.pull_rows)

    def begin(self, parameters: Mapping[str, nn.Parameter], lookups: Mapping[str, NDArray[np.int64]]) -> None:
        """Pull the first values, and the rows of the first batch."""
        with self._lock:
            self._pull(lookups)
        self._load(parameters)

    def read_ahead(self, lookups: Mapping[str, NDArray[np.int64]]) -> None:
        """Begin to read rows, ids by table, that the next ``exchange`` looks up; needless with ``is_ahead``."""
        if lookups and not self.is_ahead:
            with self._changed:
                self._wanted = lookups
                self._changed.notify_all()

    def exchange(
        self,
        gradients: Gradients,
        parameters: Mapping[str, nn.Parameter],
        lookups: Mapping[str, NDArray[np.int64]],
    ) -> None:
        """Push gradients, and write what the next step computes with to the parameters.

        ``lookups`` are ids by table of the batch whose rows are to be pulled: the next one, or with ``is_ahead`` the
        one after it.

        Raises:
            ServerError: what the exchange, or the one before it, met.
        """
        if self.is_ahead:
            self.wait()
            self._load(parameters)
        with self._changed:
            self._work = gradients, lookups
            self._changed.notify_all()
        if not self.is_ahead:
            self.wait()
            self._load(parameters)

    def wait(self) -> None:
        """Wait until all that was given is pushed, and counts.

        Raises:
            ServerError: what the exchange met.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._work is None or self._error is not None)
            if self._error is not None:
                raise self._error

    @property
    def num_uncounted(self) -> int:
        """The number of batches whose gradients are pushed and could still be lost."""
        return len(self._uncounted)

    def take_counted(self) -> list[int]:
        """Take the batches whose gradients count since the last call, and cannot be lost."""
        with self._changed:
            counted, self._counted = self._counted, []
            return counted

    def ask(self) -> None:
        """Ask servers what cannot be lost by now of what was pushed."""
        with self._lock:
            self.client.ask_durable()
            self._note_counted()

    def _note_counted(self) -> None:
        kept = self.client.kept_units
        with self._changed:
            self._counted += sorted(self._uncounted - kept)
            self._uncounted &= kept

    def pull_rows(self, table: str, ids: NDArray[np.int64]) -> Tensor:
        """Pull rows (n, width) of a table at once."""
        self.wait()
        with self._lock:
            return self.client.pull_rows(table, ids)

    def close(self) -> None:
        """End the thread; what it was pushing may count or not."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        for table in self._tables.values():
            table.bind(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, parameters: Mapping[str, nn.Parameter]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.client.tensors[name].view(parameter.shape))
        for table, held in self._rows.items():
            self._tables[table].hold(*held)
        self._rows = {}

    def _pull(self, lookups: Mapping[str, NDArray[np.int64]]) -> None:
        self._rows = self.client.pull_with_rows(lookups)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._wanted or self._is_closed, timeout=_REST_S)
                if self._is_closed:
                    return
                work, wanted, self._wanted = self._work, self._wanted, {}
            try:
                with self._lock:
                    if wanted:
                        self.client.pull_ahead(wanted)
                    if work is not None:
                        self._do(*work)
                    elif not wanted:
                        self.client.send_clock()
            except BaseException as exc:  # noqa: BLE001 - raised where the worker waits
                with self._changed:
                    self._error = exc
                    self._changed.notify_all()
                return
            with self._changed:
                if work is not None:
                    self._work = None
                self._changed.notify_all()

    def _do(self, gradients: Gradients, lookups: Mapping[str, NDArray[np.int64]]) -> None:
        client = self.client
        client.unit = gradients.unit
        if gradients.weight > 0:
            client.push(gradients.tensors, gradients.rows, weight=gradients.weight, rate=gradients.rate, is_given=True)
        client.advance()
        self._uncounted.add(gradients.unit)
        self._note_counted()
        self._pull(lookups)
