"""What can be read of a loader at any time: its numbers, and where it stands in its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..dataset.manifest import Manifest
from ..order.plan import Order
from .no_items import NoItems
from .run import Passes


class Standing:
    """The properties of a loader that its passes and its manifest know. Used by the training loop's thread only."""

    _passes: Passes
    _manifest: Manifest

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank; with ``batch_tokens``, of the epoch of ``epoch``.

        Raises:
            TypeError: samples may be dropped, so that only reading tells; or the epoch never ends, as that of a mixture
                with stop="never". As of torch's iterable data sets.
        """
        return self._passes.position.steps_per_epoch

    def __bool__(self) -> bool:
        """True: ``if loader:`` asks whether there is one, and not for a number of batches, which may not be known."""
        return True

    if not TYPE_CHECKING:  # for type checkers, indexing a loader is the error that it is
        __getitem__ = NoItems(
            "a DistributedDataLoader is no data set that something else makes batches of: it shuffles, reads and "
            "batches itself; loop over it, `for batch in loader`, in place of torch's DataLoader. What takes nothing "
            "but a DataLoader takes TorchLoader(loader) of penstock.loader.integrations; in Hugging Face's Trainer, "
            "return that from get_train_dataloader, and leave train_dataset= away. Parts of the data are subset=, "
            "single samples loader.dataset[i]"
        )

        def __array__(self, *_: object, **__: object) -> NoReturn:
            # Without this numpy would read the whole epoch, and keep all batches as objects of one array.
            raise TypeError(
                "a DistributedDataLoader is no array: numpy would read its whole epoch and keep every batch; loop over "
                "it, `for batch in loader`, and make arrays of a batch's fields; all batches of a small epoch at once "
                "are list(loader)"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Frameworks copy what holds a loader, such as a module or its arguments; Python's error would name a lock.
        raise TypeError(
            "a DistributedDataLoader has threads and one position, so it is neither copied nor pickled: make it in the "
            "process that needs it, as in train_dataloader(), and keep it out of what is copied, as the attributes "
            "of a module are; state_dict() is its position, for another loader"
        )

    @property
    def steps_left(self) -> int:
        """Batches from the current position to the epoch's end: fewer than ``len`` after a resume in mid-epoch.

        Raises:
            TypeError: as of ``len``.
        """
        return self._passes.position.steps_left

    @property
    def drops_samples(self) -> bool:
        """Whether ``keep=`` or ``transform=`` may drop samples, so that epochs have no known number of batches."""
        return self._passes.position.drops_samples

    @property
    def epoch(self) -> int:
        """The epoch of the last batch handed out; after a pass has ended, the next pass's."""
        return self._passes.position.epoch

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of this rank; with ``cost`` or ``batch_tokens``, about so many."""
        return self._passes.share.batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples in a full batch of all ranks together; with ``batch_tokens``, about so many."""
        return self._passes.share.global_batch_size

    @property
    def is_batched_by_tokens(self) -> bool:
        """Whether ``batch_tokens`` decides how many samples a batch has, so that each epoch has its own ``len``."""
        return self._passes.share.budget is not None

    @property
    def rank(self) -> int:
        return self._passes.share.rank

    @property
    def world_size(self) -> int:
        return self._passes.share.world_size

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def order(self) -> Order:
        return self._passes.position.order
