"""Length of a run and size of its steps, as far as the loader tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from ..config import TrainerConfig
from ..errors import TrainerConfigError
from ..ranks.world import World
from ..report.progress import Progress


def agree_on_length(
    loader: Iterable[Any], world: World, enter: Callable[[str], None] = lambda phase: None
) -> int | None:
    """Batches of one epoch, the same on every rank, or None if the loader has no length; a collective.

    ``enter`` is called when the loader is asked, and when it has answered.

    Raises:
        TrainerConfigError: the loader cannot be iterated, or the ranks' lengths differ.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TrainerConfigError(f"loader={loader!r:.200} cannot be iterated; give an iterable of batches")
    enter("loader length")
    try:
        mine = len(loader)  # type: ignore[arg-type]
    except TypeError:
        mine = -1
    enter("construction")
    lengths = [mine]
    if world.world_size > 1:
        lengths = [0] * world.world_size
        dist.all_gather_object(lengths, mine)
    if len(set(lengths)) > 1:
        raise TrainerConfigError(
            f"loader={type(loader).__name__} has {lengths} batches on ranks 0 to {world.world_size - 1}; ranks with "
            "fewer would leave the others waiting: give every rank the same number"
        )
    return None if mine < 0 else mine


def count_steps(config: TrainerConfig, batches_per_epoch: int | None, loader: Iterable[Any]) -> int | None:
    """Steps of the whole run, or None if that is unknown and nothing needs it.

    Raises:
        TrainerConfigError: a schedule that ends at the last step, which is unknown; or a warm-up longer than the run.
    """
    steps = _count_steps(config, batches_per_epoch, loader)
    if steps is not None and config.schedule.warmup_steps > steps:
        raise TrainerConfigError(
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than the {steps} steps of the run, which "
            f"would never reach the optimizer's rate; give schedule.warmup_steps={steps} at most, or train longer"
        )
    return steps


def _count_steps(config: TrainerConfig, batches_per_epoch: int | None, loader: Iterable[Any]) -> int | None:
    if config.epochs is None:
        return config.steps
    if batches_per_epoch is None:
        if config.steps is None and config.schedule.shape != "constant":
            raise TrainerConfigError(
                f"schedule.shape={config.schedule.shape!r} needs the last step, and epochs={config.epochs} of "
                f"loader={type(loader).__name__}, which has no length, do not determine it; give steps"
            )
        return config.steps
    by_epochs = config.epochs * -(-batches_per_epoch // config.step.accumulate)
    return by_epochs if config.steps is None else min(by_epochs, config.steps)


def effective_batch_size(loader: Iterable[Any], config: TrainerConfig, replicas: int, learners: int = 1) -> int | None:
    """Samples of one update over all replicas of a learner, or None where the loader does not say.

    Raises:
        TrainerConfigError: the rate is to follow a batch size that the loader does not say.
    """
    whole = getattr(loader, "global_batch_size", None)
    share = getattr(loader, "batch_size", None)
    if whole is None and share is not None:
        whole = share * replicas
    if whole is None and config.schedule.scaling != "none":
        raise TrainerConfigError(
            f"schedule.scaling={config.schedule.scaling!r} needs the effective batch size, and "
            f"loader={type(loader).__name__} has neither global_batch_size nor batch_size; give it such an attribute, "
            "or set the optimizer's rate for this batch size and schedule.scaling='none'"
        )
    return None if whole is None else int(whole) * config.step.accumulate // learners


def leaves_steps(config: TrainerConfig, evaluation: object | None, epoch: int, taken: int) -> bool:
    """Return whether this rank's epoch ends mid-step, with ``taken`` batches, and leaves other ranks alone in it.

    Otherwise it begins a step of its own, in which the ranks find out.
    """
    if taken:
        return config.parallel.zero > 0 or config.parallel.is_spread  # each microbatch is a collective
    evaluates = evaluation is not None and config.evaluate.every is None
    return evaluates or (config.epochs is not None and epoch + 1 >= config.epochs)


def is_done(config: TrainerConfig, progress: Progress) -> bool:
    """Return whether the run has reached its last step or epoch, or has waited too long for a better metric."""
    limits = (
        (progress.step, config.steps),
        (progress.epoch, config.epochs),
        (progress.evaluations_without_better, config.evaluate.patience),
    )
    return any(limit is not None and done >= limit for done, limit in limits)
