"""Schedules: the order of a run, the boundaries of its epochs, and the state of a place in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..order.costs.steps import Steps
    from ..order.plan import Order, Share
    from ..order.spans import Course, SourceOrder
    from ..pipeline.delivery_queue import Delivery
    from .unsized import Unsized

Place = tuple[int, int]  # an epoch, and how many of its positions are consumed


class State(Protocol):
    """A saved place."""

    @property
    def epoch(self) -> int: ...

    @property
    def consumed(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


class Schedule(ABC):
    """The schedule of one data set, or of a mixture. Used by the training loop's thread only.

    ``share`` is cut out of global batches. ``unsized`` holds the counts that only reading tells; None where arithmetic
    tells how many batches an epoch has.
    """

    subject: ClassVar[str]  # of the error that there is no number of batches
    share: Share
    unsized: Unsized | None = None

    @property
    @abstractmethod
    def order(self) -> Order:
        """The part of the order that all sources share."""

    @property
    @abstractmethod
    def orders(self) -> Sequence[SourceOrder]:
        """The order of each source."""

    @abstractmethod
    def course(self, epoch: int, consumed: int) -> Course:
        """Make the course of the run from a place on: the upcoming one, or the beginning of an epoch."""

    @abstractmethod
    def steps(self, epoch: int) -> Steps:
        """Make the batches of an epoch."""

    def count_steps(self, here: Place, upcoming: Place) -> int:
        """Count the batches of a whole epoch; ``here`` ends the last batch. Raises TypeError if only reading tells."""
        return self.steps(here[0]).count(0)

    def rest_at(self, epoch: int, consumed: int) -> int:
        """Count the samples of an epoch that are left at a place and fill no batch, where arithmetic tells."""
        return 0

    @abstractmethod
    def check_share(self, share: Share) -> None:
        """Raise PartitionError if an epoch has no batch with this share."""

    def set_share(self, share: Share, here: Place) -> None:
        """Cut global batches by ``share`` from the upcoming one on, which is ``here``."""
        self.share = share

    @abstractmethod
    def check_epoch(self, epoch: int) -> None:
        """Raise ConfigError where the beginning of an epoch is unknown."""

    @abstractmethod
    def go_to(self, epoch: int, consumed: int, *, is_back: bool) -> None:
        """Note a jump to a place that no batch led to; ``is_back``: in an earlier epoch."""

    def take(self, item: Delivery) -> None:
        """Note that a delivery was taken."""
        if self.unsized is not None:
            self.unsized.take(item)

    def set_weights(self, weights: Mapping[str, float], at: int | None, here: Place) -> None:
        """Change weights by source name, from the upcoming batch, ``here``, or from the first at ``at`` on."""
        raise ConfigError("set_weights on a loader of one data set; it is for a Mixture of several")

    @abstractmethod
    def to_state(self, epoch: int, consumed: int) -> State:
        """Save the upcoming place with the data's identity and the order, for another loader."""

    @abstractmethod
    def check_state(self, state: Mapping[str, Any]) -> Any:
        """Read a state that is to be continued here.

        Raises:
            StateMismatchError: the state is of another data set, seed or order, or damaged; names what differs.
        """

    @abstractmethod
    def load(self, state: Any) -> tuple[Place, Sequence[str]]:
        """Take over the order of a state that ``check_state`` returned: its place, and what to warn of."""
