"""The sampler: a loader's place in its run, the next batches, and the state that saves both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, stacklevel_of_user
from ..order.costs.steps import skip_steps

if TYPE_CHECKING:
    from ..order.outputs import Cursors
    from ..order.plan import Order, Share
    from ..order.spans import Course, SourceOrder
    from ..pipeline.delivery_queue import Delivery
    from .schedule import Schedule, State

Report = Callable[[int, int, int], None]  # gets positions of an epoch: (epoch, start, stop)


class MixtureChangedWarning(UserWarning):
    """A state was loaded into a mixture of other sources or weights; says what became of each."""


def ignore(epoch: int, start: int, stop: int) -> None:
    """Ignore a report."""


class Sampler:
    """The first sample of a run that has not been handed out.

    The first ``consumed`` positions of ``epoch`` have been handed out. Where no batch is left of an epoch, ``epoch``
    stays what it is until the next one begins, so that it is the epoch of the last batch; ``upcoming`` says where that
    next batch is. ``is_loaded`` says that no batch was handed out since a state was loaded, ``times_set`` how often an
    epoch was set. Used by the training loop's thread only.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.epoch, self.consumed = 0, 0
        self.is_loaded = False
        self.times_set = 0
        self._unsized = schedule.unsized

    @property
    def order(self) -> Order:
        """The part of the order of samples that all sources share, beside the data."""
        return self.schedule.order

    @property
    def orders(self) -> Sequence[SourceOrder]:
        """The order of each source."""
        return self.schedule.orders

    @property
    def share(self) -> Share:
        """This rank's part of global batches."""
        return self.schedule.share

    @property
    def drops_samples(self) -> bool:
        """Return whether only reading tells how many batches an epoch has."""
        return self._unsized is not None

    # -- what comes next ------------------------------------------------------------------------------------------

    @property
    def upcoming(self) -> tuple[int, int]:
        """The place of the next batch, as (epoch, consumed): here, or at the beginning of the next epoch."""
        if self._unsized is None:
            has_more = self.schedule.steps(self.epoch).ahead(self.consumed, 1) > 0
        else:
            has_more = not self._unsized.has_ended
        return (self.epoch, self.consumed) if has_more else (self.epoch + 1, 0)

    @property
    def pass_start(self) -> tuple[int, int]:
        """The place where a pass would begin now, as (epoch, consumed)."""
        return (self.epoch, self.consumed) if self.is_loaded else (self.upcoming[0], 0)

    @property
    def steps_per_epoch(self) -> int:
        """Count the batches of a whole epoch; with ``batch_tokens`` epochs differ, and counting takes a scan.

        Raises:
            TypeError: only reading tells, or the epoch never ends.
        """
        self._refuse_unsized()
        return self.schedule.count_steps((self.epoch, self.consumed), self.upcoming)

    @property
    def steps_left(self) -> int:
        """Count the batches from here to the epoch's end. Raises TypeError where ``steps_per_epoch`` does."""
        self._refuse_unsized()
        return self.schedule.steps(self.epoch).count(self.consumed)

    def _refuse_unsized(self) -> None:
        if self._unsized is not None:
            raise TypeError(
                f"{self.schedule.subject} has no number of batches: what is made of them is known once it is read; "
                "iterate over it, without len() and without a DataLoader of torch's around it"
            )

    @property
    def tail(self) -> int:
        """Count the samples left here and dropped, because they fill no batch of ``batch_tokens``."""
        return 0 if self.share.budget is None else self._rest_at(self.epoch, self.consumed)

    def _rest_at(self, epoch: int, consumed: int) -> int:
        return 0 if self._unsized is not None else self.schedule.rest_at(epoch, consumed)

    def course(self, epoch: int, consumed: int) -> Course:
        """Make the course of the run from a place on: the upcoming one, or the beginning of an epoch."""
        return self.schedule.course(epoch, consumed)

    def cursors(self) -> Cursors | None:
        """Find each lane's place before the next batch of a data set, where that is not arithmetic."""
        if self._unsized is None or self._unsized.is_mixed:
            return None
        [lap] = self._unsized.laps_at(*self.upcoming)
        return self._unsized.cursors_at(0, lap)

    # -- what moves it --------------------------------------------------------------------------------------------

    def follows(self, item: Delivery) -> bool:
        """Return whether a delivery, a batch or the end of an epoch, is the one that comes next here."""
        if self._unsized is not None and item.is_end and (item.epoch, item.start) == (self.epoch, self.consumed):
            return True  # nothing is left here: of the rest, no global batch of this size can be made
        return self.upcoming == ((item.epoch + 1, 0) if item.is_end else (item.epoch, item.start))

    def advance(self, epoch: int, consumed: int) -> None:
        """Note that a batch was handed out, up to position ``consumed`` of ``epoch``."""
        self.epoch, self.consumed, self.is_loaded = epoch, consumed, False

    def take(self, item: Delivery) -> None:
        """Note that a delivery was taken: a batch was handed out, or an epoch has ended."""
        self.advance(*((item.epoch + 1, 0) if item.is_end else (item.epoch, item.stop)))
        self.schedule.take(item)

    def save(self) -> tuple[Any, ...]:
        """Save its place, for ``restore``."""
        return self.epoch, self.consumed, self.is_loaded, None if self._unsized is None else self._unsized.save()

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to the place that ``save`` returned."""
        self.epoch, self.consumed, self.is_loaded, read = saved
        if self._unsized is not None:
            self._unsized.restore(read)

    def _go_to(self, epoch: int, consumed: int, *, is_back: bool = False) -> None:
        self.epoch, self.consumed = epoch, consumed
        if self._unsized is not None:
            self._unsized.has_ended = False
        self.schedule.go_to(epoch, consumed, is_back=is_back)

    def begin_pass(self) -> bool:
        """Go to the beginning of a pass: to the upcoming epoch's beginning, or nowhere if a state was just loaded.

        Returns whether that is another place than the upcoming one, which makes the read-ahead useless.
        """
        moved = self.upcoming != self.pass_start
        self._go_to(*self.pass_start)
        return moved

    def set_epoch(self, epoch: int) -> bool:
        """Go to an epoch's beginning, unless a state just loaded is inside it; returns what ``begin_pass`` returns."""
        self.schedule.check_epoch(epoch)
        if self.is_loaded and epoch == self.epoch:
            return False
        moved, is_back = self.upcoming != (epoch, 0), epoch < self.epoch
        self.is_loaded = False
        self.times_set += 1
        self._go_to(epoch, 0, is_back=is_back)
        return moved

    def skip_end(self, report: Report = ignore) -> None:
        """Go to the next epoch's beginning if no batch is left here.

        ``report`` gets the samples left that fill no batch, where arithmetic tells, as (epoch, start, stop).
        """
        self._report_rest(self.epoch, self.consumed, report)
        self.epoch, self.consumed = self.upcoming
        if self._unsized is not None:
            self._unsized.has_ended = False

    def _report_rest(self, epoch: int, consumed: int, report: Report) -> None:
        if rest := self._rest_at(epoch, consumed):
            report(epoch, consumed, consumed + rest)

    def skip(self, steps: int, report: Report, report_rest: Report = ignore) -> None:
        """Skip ``steps`` batches, through the ends of epochs: go where a state loaded after them would be.

        ``report`` gets the positions passed over as (epoch, start, stop), ``report_rest`` what fills no batch at the
        end of an epoch; if one raises, this stays where it was.
        """
        if steps and self._unsized is not None:
            raise ConfigError(
                f"skip_batches({steps}) of {self.schedule.subject}: which samples these batches have is known only by "
                "reading them; take them from an iterator instead"
            )
        ended = partial(self._report_rest, report=report_rest)
        self.epoch, self.consumed = skip_steps(*self.upcoming, steps, self.schedule.steps, report, ended)
        self.is_loaded = True
        if self._unsized is not None:
            self._unsized.has_ended = False

    def seek(self, epoch: int, batch: int) -> bool:
        """Go to a batch by its number in an epoch; returns whether that is another place than the upcoming one.

        Raises:
            ConfigError: the epoch has fewer batches, or only reading tells where they begin.
        """
        if self._unsized is not None:
            raise ConfigError(
                f"seek({epoch}, {batch}) of {self.schedule.subject}: where a batch begins is known only by reading all "
                "before it; give a loader that drops nothing and packs nothing"
            )
        before = self.upcoming
        self.schedule.check_epoch(epoch)
        if (ahead := self.schedule.steps(epoch).ahead(0, batch + 1)) <= batch:
            raise ConfigError(f"seek({epoch}, {batch}): epoch {epoch} has {ahead} batches; give a lower number")
        self.times_set += 1
        self._go_to(epoch, 0, is_back=epoch < self.epoch)
        self.skip(batch, ignore)
        return self.upcoming != before

    def check_share(self, share: Share) -> None:
        """Raise PartitionError if an epoch has no batch with this share."""
        self.schedule.check_share(share)

    def change_share(self, share: Share, report: Report = ignore) -> None:
        """Cut global batches by ``share``, which ``check_share`` has seen, from the upcoming one on.

        ``report`` as in ``skip_end``, of the samples that fill none of the new batches.
        """
        self.skip_end()  # of what had no batch left before
        self.schedule.set_share(share, (self.epoch, self.consumed))
        self.skip_end(report)

    def set_weights(self, weights: Mapping[str, float], at: int | None) -> None:
        """Change weights by name, from the upcoming batch on, or from the first at position ``at`` of the run."""
        here = self.upcoming
        self.schedule.set_weights(weights, at, here)
        self._go_to(*here)

    # -- states ---------------------------------------------------------------------------------------------------

    def to_state(self) -> State:
        """Save the upcoming place with the data's identity and the order, for another loader."""
        return self.schedule.to_state(*self.upcoming)

    def check_state(self, state: Mapping[str, Any]) -> Any:
        """Read a state that is to be continued here.

        Raises:
            StateMismatchError: the state is of another data set, seed or order, or damaged; names what differs.
        """
        return self.schedule.check_state(state)

    def load(self, state: Any, report: Report = ignore) -> None:
        """Take over the order and place of a state that ``check_state`` returned; ``report`` as of ``skip_end``."""
        (self.epoch, self.consumed), news = self.schedule.load(state)
        self.is_loaded = True
        self.skip_end(report)
        if news:
            warnings.warn(
                "the mixture differs from the state's: " + "; ".join(news),
                MixtureChangedWarning,
                stacklevel=stacklevel_of_user(),
            )
