"""The source of microbatches: the loader's epochs, one after another, and its position in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TrainerConfigError, TrainerError
from ..ranks.mesh import MODEL_DIMS, Mesh
from .batches import move_batch


class Feed:
    """Takes a loader's batches in groups. Any iterable works; one with ``state_dict`` resumes at the exact sample.

    The microbatches of a step are taken before it begins, so that the loader's position after the step is exact.
    With ``ends_apart`` the ranks agree on each step's number of microbatches, and ``left_out`` counts the batches of
    the epoch that only some ranks had. All mutable state besides the loader's: the epoch's iterator, that count, the
    batches given of this epoch since it was begun or resumed, all batches taken of it if known, the last
    batch's epoch, and whether an epoch just ended.
    """

    def __init__(self, loader: Iterable[Any], *, accumulate: int, mesh: Mesh) -> None:
        self.loader = loader
        self.ends_apart = False
        self.left_out = 0
        self._accumulate = accumulate
        self._mesh = mesh
        self._world = mesh.world
        self._length: int | None = None
        self._check_end: Callable[[int, int], None] = lambda given, length: None
        self._leaves_steps: Callable[[int, int], bool] = lambda epoch, taken: False
        self._given = 0
        self._taken: int | None = 0
        self._batches: Iterator[Any] | None = None
        self._epoch: int | None = None  # of the last batch
        self._found_none = False  # the last take found no batch
        self._epoch_is_over = False  # known only to a run that resumes between an epoch's last step and its end

    @property
    def is_exact(self) -> bool:
        """Return whether the loader can resume at the exact sample."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    @property
    def seems_over(self) -> bool:
        """Return whether all batches of an epoch are taken by the loader's length, but not its end; ``take`` does."""
        return self._epoch_is_over or (self._batches is not None and self._taken == self._length is not None)

    def expect(
        self, length: int | None, check_end: Callable[[int, int], None], leaves_steps: Callable[[int, int], bool]
    ) -> None:
        """Expect ``length`` batches in each epoch; None: the ranks may end apart.

        ``check_end`` gets the number given, and the length, where there were fewer and ``leaves_steps`` says so
        of the epoch and of the batches that are there for a step.
        """
        self.ends_apart, self._length = length is None, length
        self._check_end, self._leaves_steps = check_end, leaves_steps

    def take(self, epoch: int) -> list[Any]:
        """Take the microbatches of the next step, on the device: fewer at the epoch's end, and none once after it.

        Where the ranks' iterables may end apart, this is a collective, and the epoch ends with the first of them.

        Raises:
            TrainerError: an epoch has no batch.
        """
        if self._epoch_is_over:
            self._epoch_is_over, self._taken = False, 0
            return []
        if self._batches is None:
            self._begin_epoch(epoch)
            self._batches = iter(self.loader)
        taken = []
        for batch in islice(self._batches, self._accumulate):
            # Read here: when the loop finds the loader empty, the loader is at the next epoch.
            self._epoch = getattr(self.loader, "epoch", None)
            taken.append(move_batch(batch, self._world.device))
        self._given += len(taken)
        is_short = len(taken) < self._accumulate and self._length is not None and self._given < self._length
        if is_short and self._leaves_steps(epoch, len(taken)):
            self._check_end(self._given, self._length or 0)
        if self.ends_apart and self._world.world_size > 1:
            taken = self._as_many_as_others(taken)
        if taken:
            self._found_none = False
            self._taken = None if self._taken is None else self._taken + len(taken)
            return taken
        self._batches, self._taken = None, 0
        # The first empty take is an epoch's end, also of one that a resumed loader had finished before. A second one
        # in a row is an epoch without a batch.
        if self._found_none:
            raise TrainerError(
                f"epoch {epoch}: loader={type(self.loader).__name__} gave no batch; is it an exhausted iterator, or "
                "is the batch size above the number of samples?"
            )
        self._found_none = True
        return []

    def find_end(self, epoch: int) -> bool:
        """Return whether an epoch that seems over is over, and take its end. A batch too many is the next step's."""
        if not self.seems_over:
            return False
        for batch in self._batches or ():
            self._batches, self._taken = chain((batch,), self._batches or ()), None
            return False
        return not self.take(epoch)

    def skip(self, steps: int, epoch: int, draws: Callable[[], None] = lambda: None) -> int:
        """Skip the batches of that many more steps; returns how many epochs ended among them.

        A step has fewer batches at an epoch's end. A loader that has ``skip_batches`` and an ``epoch`` does not read
        them. Of others, of penstock's where it ``drops_samples``, and where ranks may end apart, they are drawn, which
        ``draws`` is called before each step; a collective where ``take`` is one.
        """
        if not steps:
            return 0
        if self._epoch is not None and self._skips_unread():
            before = self._epoch
            self._skip_unread(steps)
            self._batches, self._taken, self._epoch = None, None, int(self.loader.epoch)  # type: ignore[attr-defined]
            return self._epoch - before
        ended = 0
        while steps:
            draws()
            if self.take(epoch + ended):
                steps -= 1
            else:
                ended += 1
        return ended

    def _skips_unread(self) -> bool:
        loader = self.loader
        if getattr(loader, "drops_samples", False) or not callable(getattr(loader, "skip_batches", None)):
            return False
        return not self.ends_apart or self._world.world_size == 1 or hasattr(type(loader), "steps_left")

    def _skip_unread(self, steps: int) -> None:
        loader: Any = self.loader
        taken = self._taken
        while steps:
            left = self._batches_left(taken) if self._accumulate > 1 else math.inf
            if left is None:
                self._skip_one_by_one()
                steps -= 1
                continue
            most = min(steps, math.ceil(left / self._accumulate) if math.isfinite(left) else steps)
            loader.skip_batches(int(min(most * self._accumulate, left)))
            steps, taken = steps - most, 0 if most * self._accumulate >= left else None

    def _skip_one_by_one(self) -> None:
        """Skip one step, as far as its epoch goes, of a loader that does not say how far that is."""
        loader: Any = self.loader
        loader.skip_batches(0)  # then its epoch is that of the next batch, also at an end
        epoch = loader.epoch
        for _ in range(self._accumulate):
            loader.skip_batches(1)
            if loader.epoch != epoch:
                return

    def _batches_left(self, taken: int | None) -> float | None:
        """Count the batches up to the epoch's end, or in the next one where none is left; infinity if it is endless.

        Returns None where the loader does not say. ``taken`` counts those taken of the epoch, where that is known.
        """
        loader: Any = self.loader
        try:
            if hasattr(type(loader), "steps_left"):
                if not loader.steps_left:
                    loader.skip_batches(0)  # to the next epoch's beginning, which may have another number of batches
                return int(loader.steps_left)
        except TypeError:
            return math.inf
        try:
            whole = len(loader)
        except TypeError:
            return None
        return None if taken is None else whole - taken if taken < whole else whole

    def tell_limits(self, note: Callable[[str], None]) -> None:
        """Note the guarantees that a loader without a state cannot give."""
        if not self.is_exact:
            note(
                f"loader={type(self.loader).__name__} has no state_dict: a resumed run starts its epoch over, so "
                "samples of that epoch may come twice"
            )

    def tell_left_out(self, epoch: int, note: Callable[[str], None]) -> None:
        """Note, at an epoch's end, the batches that only some ranks had."""
        if self.left_out:
            note(
                f"epoch {epoch}: the ranks' iterables have different lengths; at least {self.left_out} batches that "
                "only some ranks had were left out. Give every rank the same number"
            )

    def state_dict(self) -> dict[str, Any]:
        """Save the loader's state if it has one, the epoch of its last batch, and whether the caller saw its end."""
        if not self.is_exact:
            return {"loader": None}
        return {
            "loader": self.loader.state_dict(),  # type: ignore[attr-defined]
            "epoch": self._epoch,
            "end_was_told": self._batches is None and not self._epoch_is_over,
            "taken": self._taken,
            "length": self._length,
        }

    def gather_state(self) -> dict[str, Any]:
        """Gather the state to save: this rank's if all agree, else ``{"ranks": [...]}``; a collective.

        It then has one of each replica, whose ranks take the same batches.
        """
        own = self.state_dict()
        if not self.is_exact or self._world.world_size == 1:
            return own
        everywhere: list[dict[str, Any]] = [{}] * self._world.world_size
        dist.all_gather_object(everywhere, own)
        if all(state == everywhere[0] for state in everywhere):
            return own
        places = map(self._mesh.sizes.place, range(len(everywhere)))
        is_first = [not any(place[dim] for dim in MODEL_DIMS) for place in places]
        return {"ranks": [one for one, is_kept in zip(everywhere, is_first, strict=True) if is_kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of ``state_dict`` or ``gather_state``.

        Raises:
            TrainerConfigError: each rank's loader had a state of its own, on another number of ranks.
        """
        if "ranks" in state:
            state = self._own_part(state["ranks"])
        self._batches, self._taken = None, 0
        if state["loader"] is None or not self.is_exact:
            return
        self._taken = state.get("taken") if state.get("length") == self._length else None
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        self._epoch = state["epoch"]
        ended = self._epoch is not None and getattr(self.loader, "epoch", self._epoch) > self._epoch
        self._epoch_is_over = ended and not state["end_was_told"]

    def _begin_epoch(self, epoch: int) -> None:
        """Pass the epoch to what shuffles by it: a loader without a position, and a torch DataLoader's parts."""
        self.left_out = self._given = 0
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts = [getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        parts.append(getattr(self.loader, "dataset", None))
        if not self.is_exact:
            parts.append(self.loader)
        for part in {id(part): part for part in parts}.values():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)  # type: ignore[union-attr]

    def _as_many_as_others(self, taken: list[Any]) -> list[Any]:
        counts = torch.zeros(self._world.world_size, dtype=torch.int64, device=self._world.device)
        counts[self._world.rank] = len(taken)
        dist.all_reduce(counts)
        least = int(counts.min())
        self.left_out += (int(counts.sum()) - least * self._world.world_size) // self._mesh.replica_ranks
        return taken[:least]

    def _own_part(self, states: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        if len(states) != self._mesh.replicas:
            what = "replicas" if self._mesh.is_spread else "ranks"
            raise TrainerConfigError(
                f"loader={type(self.loader).__name__} had a state of its own on each of {len(states)} {what} when this "
                f"checkpoint was saved, and there are {self._mesh.replicas} now; resume on {len(states)} {what}, or "
                "use a loader whose state knows no ranks, such as penstock's"
            )
        return states[self._mesh.replica]
