"""What positions have in common where only reading tells how many batches an epoch has."""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import ConfigError
from ..pipeline.delivery_queue import Delivery
from ..ranks.ledger import Ledgers
from .position import RunPosition, Tell, tell_nobody


class UncountedPosition(RunPosition):
    """Comes before another kind of position among the bases of a class: each batch says whether it is an epoch's last.

    Mutable state besides: whether the epoch has ended.
    """

    drops_samples = True
    who: ClassVar[str]  # has no number of batches

    def __init__(self, *args: Any, ledgers: Ledgers, **options: Any) -> None:
        self.ledgers = ledgers
        self._has_ended = False
        super().__init__(*args, **options)

    @property
    def steps_per_epoch(self) -> int:
        raise TypeError(
            f"{self.who} has no number of batches: what is made of them is known once it is read; iterate over it, "
            "without len() and without a DataLoader of torch's around it"
        )

    @property
    def steps_left(self) -> int:
        return self.steps_per_epoch

    @property
    def upcoming(self) -> tuple[int, int]:
        return (self.epoch + 1, 0) if self._has_ended else (self.epoch, self.consumed)

    def take(self, item: Delivery) -> None:
        super().take(item)
        self._has_ended = item.is_last

    def save(self) -> tuple[Any, ...]:
        return (*super().save(), self._has_ended)

    def restore(self, saved: tuple[Any, ...]) -> None:
        *others, self._has_ended = saved
        super().restore(tuple(others))

    def begin_pass(self) -> bool:
        moved = super().begin_pass()
        self._has_ended = False
        return moved

    def set_epoch(self, epoch: int) -> bool:
        stays = self.is_loaded and epoch == self.epoch
        moved = super().set_epoch(epoch)
        self._has_ended = self._has_ended and stays
        return moved

    def _rest_at(self, epoch: int, consumed: int) -> int:
        return 0

    def skip_end(self, tell: Tell = tell_nobody) -> None:
        super().skip_end(tell)
        self._has_ended = False

    def skip(self, steps: int, tell: Tell, tell_rest: Tell = tell_nobody) -> None:
        if steps:
            raise ConfigError(
                f"skip_batches({steps}) of {self.who}: which samples these batches have is known only by reading them; "
                "take them from an iterator instead"
            )
        super().skip(steps, tell, tell_rest)
        self._has_ended = False
