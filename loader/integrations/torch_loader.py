"""The loader as an instance of torch's DataLoader, for frameworks that take nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ..config.foreign import NoItems
from ..errors import ConfigError
from ..order.state import unseal

if TYPE_CHECKING:
    from ..data_loader import DistributedDataLoader


class TorchLoader(DataLoader[Any]):
    """A ``DistributedDataLoader`` that passes for a ``torch.utils.data.DataLoader``.

    A loop over it is a pass over ``loader`` itself: no worker, sampler or collation of torch's comes between.
    Frameworks see a loader that is dealt out over the ranks already, and leave it so: its ``sampler`` is a
    ``DistributedSampler``, and it is marked as prepared by Accelerate. What they build out of its ``dataset`` and
    ``batch_sampler`` to skip the first n batches of an epoch goes to batch n at once, and reads none of those before.

    ``len(dataset)`` is the samples of all ranks. ``state_dict``, ``load_state_dict`` and ``set_epoch`` are the
    loader's.

    Raises:
        ConfigError: the loader drops samples, so that its epochs have no number of batches to count with.
    """

    _is_accelerate_prepared = True  # Accelerate would deal out this rank's batches once more, in silence
    if not TYPE_CHECKING:
        __getitem__ = NoItems(
            "a TorchLoader is a DataLoader already, and no data set for another one: give it to what takes a "
            "DataLoader; in Hugging Face's Trainer, return it from get_train_dataloader, and leave train_dataset= away"
        )

    def __init__(self, loader: DistributedDataLoader[Any]) -> None:
        if loader.drops_samples:
            raise ConfigError(
                "a loader that drops or packs samples (keep=, may_drop=, packing= or on_error='skip') in a framework "
                "that counts batches: how many an epoch has is known only by reading it; loop over the loader "
                "yourself, or train with DistributedTrainer"
            )
        self._batches = _Batches(loader, self._begin)
        super().__init__(self._batches, sampler=_Steps(loader, self._batches), collate_fn=_only)
        self.__dict__["batch_size"] = loader.batch_size  # for those who read it; torch's would be 1, a step
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._batches.forget()
        return self._begin()

    def __len__(self) -> int:
        """Count the batches of a whole epoch, the same on every rank."""
        return len(self.loader)

    def __bool__(self) -> bool:
        return True

    def _begin(self) -> Iterator[Any]:
        """Begin a pass, at the epoch's beginning or where a framework skips to."""
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless a state that was just loaded is inside it."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, the same on every rank."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called; a framework that skips batches then must skip to the same place."""
        self.loader.load_state_dict(state)
        self._batches.expect(self.loader.state_dict()["consumed"])


class _Steps(DistributedSampler[int]):
    """The numbers of an epoch's steps, alike on every rank: the loader itself knows its samples of a step."""

    def __init__(self, loader: DistributedDataLoader[Any], batches: _Batches) -> None:
        super().__init__(batches, num_replicas=loader.world_size, rank=loader.rank, shuffle=False)
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self._loader))
        self._batches.finish(len(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: Fabric counts epochs from 0 after a resume, too, and the loader knows its own."""


class _Batches(Dataset[Any]):
    """The batches of the loader's epoch by their step; any step may come first, and then one after another.

    Mutable state: the pass under way and its next step; where a loaded state is, until a pass begins.
    """

    def __init__(self, loader: DistributedDataLoader[Any], begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin
        self._pass: Iterator[Any] = iter(())
        self._next: int | None = None
        self._loaded: int | None = None

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def __getitem__(self, step: int) -> Any:
        if step != self._next:
            self._pass = self._begin_at(step)
        self._next = step + 1
        return next(self._pass)

    def expect(self, consumed: int) -> None:
        """Note that a state was loaded, at ``consumed`` samples of its epoch."""
        self._next, self._loaded = None, consumed

    def finish(self, steps: int) -> None:
        """End the pass, and so the loader's epoch, when all its steps were asked for.

        Raises:
            ConfigError: all were skipped, though the loaded state is inside the epoch.
        """
        if self._loaded:
            raise self._misplaced(steps)
        if self._next is None and self._loaded is None:  # all were skipped
            self._loader.set_epoch(self._loader.state_dict()["epoch"] + 1)
        next(self._pass, None)
        self.forget()

    def forget(self) -> None:
        """Note that a pass begins elsewhere."""
        self._pass, self._next, self._loaded = iter(()), None, None

    def _begin_at(self, step: int) -> Iterator[Any]:
        if not self._is_at(step):
            if self._loaded is not None:
                raise self._misplaced(step)
            self._go_to(step)
        elif self._loaded is None:  # a pass is to begin here, and not in the next epoch
            self._loader.load_state_dict(self._loader.state_dict())
        self._loaded = None
        return self._begin()

    def _is_at(self, step: int) -> bool:
        if self._loader.is_batched_by_tokens:
            return len(self._loader) - self._loader.steps_left == step
        return bool(self._loader.state_dict()["consumed"] == step * self._loader.global_batch_size)

    def _go_to(self, step: int) -> None:
        """Go to a step of the epoch, wherever in it the loader is."""
        state = self._loader.state_dict()
        if self._loader.is_batched_by_tokens or "mixture" in state:  # where a step begins is no arithmetic of states
            self._loader.set_epoch(state["epoch"] + 1)  # of a state just loaded, its own epoch would be no move
            self._loader.set_epoch(state["epoch"])
            self._loader.skip_batches(step)
        else:
            self._loader.load_state_dict({**unseal(state), "consumed": step * self._loader.global_batch_size})

    def _misplaced(self, step: int) -> ConfigError:
        loader, state = self._loader, self._loader.state_dict()
        if loader.is_batched_by_tokens:
            return ConfigError(
                f"the loaded state is at batch {len(loader) - loader.steps_left} of epoch {state['epoch']}, and the "
                f"framework skips to batch {step}: the number of ranks or batch_tokens= is not what it was when the "
                "state was saved, or the framework's count is not"
            )
        batch = loader.global_batch_size
        return ConfigError(
            f"the loaded state is at sample {self._loaded} of epoch {state['epoch']}, and the "
            f"framework skips {step} batches of {batch}, to sample {step * batch}: the global batch is not what it was "
            "when the state was saved, or the framework's count is not; give the loader the global_batch_size of that "
            "run, and keep the accumulation steps"
        )


def _only(batches: list[Any]) -> Any:
    """Take the batch out of a list of one: it is collated already."""
    return batches[0]
