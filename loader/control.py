"""What moves a loader, and what changes its batches: each the same on all ranks, from the next batch on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .config.checks import check_at_least
from .errors import ConfigError
from .order.plan import Share
from .parts import Parts
from .positions.position import RunPosition
from .run.resources import Resources
from .run.run import Passes


class Control:
    """The methods of a loader that set its position and its batches. Used by the training loop's thread only."""

    _parts: Parts
    _passes: Passes
    _position: RunPosition
    _resources: Resources

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless a state that was just loaded is inside it. Ends the running pass."""
        check_at_least("epoch", epoch, 0)
        self._resources.check_open()
        self._note_move()
        if self._position.set_epoch(epoch):
            self._resources.stop_pipeline()

    def set_shares(self, weights: Sequence[float] | None) -> None:
        """From the next batch on, cut global batches in proportion to ``weights``, one positive number per rank.

        None makes the shares equal again. Every rank must call this with the same weights after the same batch. Global
        batches keep their samples. What was read ahead is dropped.

        Raises:
            PartitionError: the weights are not one positive number per rank.
            ConfigError: ``batch_tokens`` bounds each rank's rows.
        """
        budget = self._passes.share.budget
        if weights is not None and budget is not None and budget.padded:
            raise ConfigError(
                "set_shares with batch_tokens= of padded tokens: a rank would have more rows than its budget holds; "
                "give the loader TokenBudget(padded=False), or batch_size="
            )
        if isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
            weights = tuple(weights)
        share = replace(self._passes.share, weights=weights)
        self._resources.check_open()
        self._passes.note_call(f"set_shares({None if weights is None else [float(weight) for weight in weights]})")
        self._change_share(share)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch of the newest pass: a small dict for JSON, the same on every rank."""
        return self._position.to_state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called, with any world size, batch size and number of threads.

        The next pass begins there; a running one goes on from there, or ends if the state is in another epoch.

        Raises:
            StateMismatchError: the state belongs to another data set, seed or order; names what differs.
        """
        loaded = self._position.check_state(state)
        self._resources.check_open()
        self._resources.stop_pipeline()
        self._note_move()
        if self._resources.log is not None:
            self._resources.log.record_load(loaded.epoch, loaded.consumed)
        self._position.load(loaded, self._record_rest)

    def skip_batches(self, count: int) -> None:
        """Go on ``count`` global batches further, without reading them; past an epoch's end in the next epoch.

        As after ``load_state_dict``, the next pass begins there; a running one goes on from there, or ends if that is
        in another epoch, whose end is then not told by a pass. Every rank must skip as many after the same batch. An
        audit counts their samples as skipped.

        Raises:
            ConfigError: the count is negative or no integer.
        """
        check_at_least("count", count, 0)
        self._resources.check_open()
        self._resources.stop_pipeline()
        self._passes.note_call(f"skip_batches({count})")
        self._note_move()
        log = self._resources.log
        self._position.skip(count, (lambda *_: None) if log is None else log.record_skip, self._record_rest)

    def set_batch_size(self, batch_size: int) -> None:
        """From the next batch on, each rank's batches have ``batch_size`` samples: a warm-up of the batch size, say.

        Every rank must call this with the same number after the same batch. What was read ahead is dropped; positions,
        and with them states, stay what they are. An epoch that has no batch left is over. States hold no batch size:
        after a resume, set it again. An audit counts with it from here on.

        Raises:
            ConfigError: it is no whole number of at least 1, or batches are cut by ``batch_tokens``.
            PartitionError: an epoch would have no batch.
        """
        check_at_least("batch_size", batch_size, 1)
        share = self._passes.share
        if share.budget is not None:
            raise ConfigError("set_batch_size: batch_tokens= decides how many samples a batch has; leave it out")
        self._resources.check_open()
        share = replace(share, global_batch_size=batch_size * share.world_size)
        self._position.check_share(share)
        self._passes.note_call(f"set_batch_size({batch_size})")
        self._change_share(share)
        if self._resources.log is not None:
            self._resources.log.record_batch_size(*self._position.upcoming, share.global_batch_size)

    def set_weights(self, weights: Mapping[str, float], *, at: int | None = None) -> None:
        """Change the weights of a mixture's sources, by name, from the next batch on; each goes on where it was.

        Sources that are not named keep theirs; what its schedule said of later positions is dropped. With ``at``, the
        weights change at the first batch from that position on, counted in samples of all ranks since the run began
        (``metrics().run_samples``). Every rank must call this with the same weights after the same batch; states hold
        the change.

        Raises:
            ConfigError: this is no mixture, a name or a weight is not possible, or the position has passed.
        """
        if self._parts.mixture is None:
            raise ConfigError("set_weights on a loader of one data set; it is for a Mixture of several")
        self._resources.check_open()
        before = self._position.upcoming
        self._parts.mixture.position.set_weights(weights, at)
        told = {name: float(weight) for name, weight in sorted(weights.items())}
        self._passes.note_call(f"set_weights({told}{'' if at is None else f', at={int(at)}'})", before)
        self._resources.stop_pipeline()

    def _note_move(self) -> None:
        if self._resources.calls is not None:
            self._resources.calls.note_move()

    def _change_share(self, share: Share) -> None:
        self._resources.stop_pipeline()
        self._position.change_share(share, self._record_rest)
        self._passes.share = share

    def _record_rest(self, epoch: int, start: int, stop: int) -> None:
        """Log what is left of an epoch and fills no batch now, which the batches before it do not tell."""
        if self._resources.log is not None:
            self._resources.log.record_drop(epoch, start, stop)
