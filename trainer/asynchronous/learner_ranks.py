"""Processes of a learner on this machine: its ranks, of which the first asks for services over a pipe.

Whoever has the run's services starts them, answers that pipe, and starts all anew when one has died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...storage.errors import PenstockError
from .. import errors
from ..errors import ServerError, TrainerError
from ..ranks.world import close_world, open_world
from ..recipes.recipe import Recipe, build_recipe
from ..server.messages import Push
from ..server.services import Services
from .leading import run_learner
from .member import WorkerOptions
from .remote_services import RemoteServices

_KINDS: dict[str, type[PenstockError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PenstockError)
}
_MOST_DEATHS = 5  # without a push between them
_SILENCE_S = 86_400.0  # other ranks may wait so long for the first one; a death they notice at once
_ENDING_S = 10.0
_TURN_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """All that one rank of a learner is started with."""

    recipe: Mapping[str, Any]
    name: str
    options: WorkerOptions
    rank: int
    ranks: int
    port: int


def run_learner_ranks(
    recipe: Recipe,
    name: str,
    services: Services,
    options: WorkerOptions | None = None,
    *,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Train as a learner of as many ranks as the recipe says, each a process, until the run is over.

    When one dies, all begin anew, and what they had leased goes back.

    Raises:
        TrainerError: what a rank met; or they died again and again, with no push between.
    """
    ranks = recipe.trainer.parallel.diloco.ranks
    deaths = 0
    while True:
        group = LearnerRanks(recipe, name, services, options or WorkerOptions(), ranks, note)
        try:
            died = group.serve()
        finally:
            group.close()
        if died is None:
            return
        deaths = 1 if group.has_pushed else deaths + 1
        if deaths > _MOST_DEATHS:
            raise ServerError(
                f"{died}, for the {deaths}th time, and {name} pushed nothing meanwhile; dmesg tells if memory was full"
            )
        note(f"{died}: what {name} had leased goes back, and it begins anew")


class LearnerRanks:
    """Ranks of one start of a learner.

    All mutable state: the processes, their pipes, whether anything was pushed, and what they have told of errors.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        services: Services,
        options: WorkerOptions,
        ranks: int,
        note: Callable[[str], None],
    ) -> None:
        self.has_pushed = False
        self._name, self._services, self._note = name, services, note
        self._error: PenstockError | None = None
        self._broken: list[str] = []
        context = multiprocessing.get_context("spawn")
        port = find_port() if ranks > 1 else 0
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            settings = RankSettings(
                recipe=recipe.describe(), name=name, options=options, rank=rank, ranks=ranks, port=port
            )
            process = context.Process(
                target=run_rank, args=(settings, theirs), name=f"{name}, rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def serve(self) -> str | None:
        """Answer calls until all ranks have ended; returns in words which one died without a word, if one did.

        Raises:
            TrainerError: what a rank met.
        """
        left = list(self._pipes)
        deadline_s: float | None = None  # for the others, once one is gone
        while left and (deadline_s is None or time.monotonic() < deadline_s):
            for pipe in wait(left, timeout=None if deadline_s is None else _TURN_S):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    left.remove(pipe)
                    process = self.processes[self._pipes.index(pipe)]
                    process.join(_ENDING_S)
                    if process.exitcode != 0:
                        deadline_s = deadline_s or time.monotonic() + _ENDING_S
                else:
                    self._answer(pipe, *message)
            if self._error is not None:
                raise self._error
        codes = [process.exitcode for process in self.processes]
        died = [rank for rank, code in enumerate(codes) if code is not None and code != 0]
        killed = [rank for rank in died if (codes[rank] or 0) < 0]
        if self._broken and not killed:  # of the others the collectives fail where one was killed
            raise ServerError(f"{self._name} failed: {'; '.join(self._broken)}")
        if not died:
            return None
        rank = (killed or died)[0]
        return f"rank {rank} of {self._name} died ({codes[rank]})"

    def close(self) -> None:
        """End processes that have not ended."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(_ENDING_S)
        for pipe in self._pipes:
            pipe.close()

    def _answer(self, pipe: Connection, method: str, values: tuple[Any, ...]) -> None:
        if method == "failed":
            kind, text = values
            self._error = _KINDS.get(kind, TrainerError)(text)
            return
        if method == "broke":
            self._broken.append(*values)
            return
        if method == "note":
            self._note(*values)
            return
        self.has_pushed |= method == "call" and isinstance(values[1], Push)
        try:
            reply: tuple[bool, Any] = True, getattr(self._services, method)(*values)
        except PenstockError as exc:
            reply = False, (type(exc).__name__, str(exc))
        with suppress(OSError):  # it died meanwhile
            pipe.send(reply)


class PipeServices(RemoteServices):
    """``Services`` at the other end of a pipe. For several threads, whose calls come one after another.

    Where that end is gone, so is the run: this process ends at once.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def note(self, text: str) -> None:
        """Hand on a sentence for people."""
        with self._lock:
            self._pipe.send(("note", (text,)))

    def _ask(self, method: str, *values: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((method, values))
                is_well, found = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)
        if not is_well:
            kind, text = found
            raise _KINDS.get(kind, ServerError)(text)
        return found


def run_rank(settings: RankSettings, pipe: Connection) -> None:
    """Be one rank of a learner, in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started it hears of these, and has it end
        signal.signal(number, signal.SIG_IGN)
    _set_place(settings)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun has it: several share the cores
    try:
        recipe = build_recipe(settings.recipe)
        world = open_world(device=recipe.trainer.device, timeout_s=_SILENCE_S)
        services = PipeServices(pipe) if settings.rank == 0 else None
        note = services.note if services is not None else lambda text: None
        run_learner(recipe, settings.name, services, world, settings.options, note=note)
    except PenstockError as exc:
        with suppress(OSError):
            pipe.send(("failed", (type(exc).__name__, str(exc))))
    except Exception as exc:
        with suppress(OSError):
            pipe.send(("broke", (f"rank {settings.rank} raised {exc!r}",)))
        raise  # its traceback is printed
    finally:
        close_world()


def _set_place(settings: RankSettings) -> None:
    """Describe this rank as torchrun would."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    if settings.ranks > 1:
        place = {"RANK": settings.rank, "WORLD_SIZE": settings.ranks}
        place |= {f"LOCAL_{name}": value for name, value in place.items()}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port)}


def find_port() -> int:
    """A port of this machine that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
