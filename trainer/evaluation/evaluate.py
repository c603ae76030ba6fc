"""Evaluation over all ranks: each sample counts once, whatever the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..data.batches import move_batch
from ..errors import TrainerConfigError, TrainerError
from ..options import check_range
from ..parallel.model import ParallelModel
from ..parallel.passes import Passes
from .metrics import MetricFunction, MetricSums
from .modes import in_evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """When to evaluate, and which result is the best."""

    every: int | None = None
    """Steps between evaluations; none: evaluate at the end of each epoch."""

    best: str | None = None
    """Metric that decides which checkpoint is the best; checkpoint.best says which end of it."""

    patience: int | None = None
    """Stop after this many evaluations in a row without a better ``best``, counted over restarts; none: never."""

    def __post_init__(self) -> None:
        check_range("evaluate.every", self.every, low=1)
        check_range("evaluate.patience", self.patience, low=1)
        if self.patience is not None and self.best is None:
            raise TrainerConfigError(
                f"evaluate.patience={self.patience} waits for a better metric; name it with evaluate.best"
            )


_LOW_IS_GOOD = frozenset(
    ("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer", "cer", "bpb", "fid")
)
_HIGH_IS_GOOD = frozenset(
    ("accuracy", "acc", "top1", "top5", "f1", "auc", "auroc", "bleu", "recall", "precision", "map", "iou", "psnr", "r2")
)


def good_end(metric: str) -> Literal["max", "min"] | None:
    """Good end of a metric, by the words of its name (``val/loss``, ``top1_accuracy``); None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    low, high = bool(words & _LOW_IS_GOOD), bool(words & _HIGH_IS_GOOD)
    return None if low == high else "min" if low else "max"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation: this rank's share of the batches, and a function from a batch to sums and counts."""

    batches: Iterable[Any]
    metrics: MetricFunction


def find_other_classes(loader: Iterable[Any], evaluation: Evaluation | None) -> str | None:
    """In words, the first number that stands for another class in the evaluation; None where none is known to.

    Read from ``loader.dataset.classes``, names in the order of their numbers, which torchvision's data sets have, too.
    """
    trained, evaluated = _names_of(loader), _names_of(None if evaluation is None else evaluation.batches)
    number = next(
        (number for number, names in enumerate(zip(trained, evaluated, strict=False)) if len(set(names)) > 1), None
    )
    if number is None:
        return None
    return (
        f"class {number} is {trained[number]!r} in the training data and {evaluated[number]!r} in the evaluation's, so "
        "that metrics of labels mean nothing; number the classes of both alike (penstock pack --classes)"
    )


def _names_of(loader: Any) -> Sequence[str]:
    names = getattr(getattr(loader, "dataset", None), "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def evaluate(
    parallel: ParallelModel,
    evaluation: Evaluation,
    *,
    passes: Passes,
    phase: Callable[[str], AbstractContextManager[Any]],
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """The metrics over all ranks' batches, or None if a rank was asked to stop; a collective.

    Sums and counts are added in float64. Ranks may have different numbers of batches: in each round all ranks learn
    which have one, and, if forward is a collective, those without repeat their last batch and do not count it.

    Raises:
        TrainerError: on every rank, if an iterator is exhausted, or a rank has no batch and forward needs all ranks.
    """
    world, mesh = parallel.world, parallel.mesh
    model = parallel.module if parallel.is_sharded else parallel.inner
    sums = MetricSums(world.device)
    with in_evaluation(model), parallel.without_backward():
        if hasattr(evaluation.batches, "set_epoch"):
            evaluation.batches.set_epoch(0)  # each evaluation sees all samples, even after an interrupted one
        source = iter(evaluation.batches)
        batch: Any = _NONE_LEFT
        with torch.no_grad():
            while True:
                with phase("evaluation fetch"):
                    fresh = next(source, _NONE_LEFT)  # a loader's batches may be None
                has_batch = fresh is not _NONE_LEFT
                with phase("evaluate"):
                    flags = [has_batch, stop_requested(), not has_batch and batch is _NONE_LEFT]
                    having, stopping, idle, replicas = _add_over_ranks(
                        [*flags, has_batch and mesh.counts_rows], world.device
                    )
                    if stopping:
                        return None
                    if having != replicas * mesh.replica_ranks:
                        raise TrainerError(
                            f"evaluation: {having:.0f} ranks have a batch, and each replica is {mesh.replica_ranks} "
                            "ranks, which need the same batches; give the loader the mesh (mesh=mesh.device_mesh)"
                        )
                    if not having:
                        if idle == world.world_size and source is evaluation.batches:
                            raise TrainerError(
                                f"evaluation: batches is a {type(source).__name__} that is exhausted, and each "
                                "evaluation iterates anew; give a list, or a loader"
                            )
                        break
                    if idle and parallel.is_sharded:
                        raise TrainerError(
                            f"evaluation: {idle:.0f} ranks have no batch and parallel.zero={parallel.config.zero} "
                            "needs all of them in forward; evaluate with last_batch='pad', or a smaller batch"
                        )
                    batch = move_batch(fresh, world.device) if has_batch else batch
                    if not has_batch and not parallel.is_sharded:
                        continue
                    with parallel.computing(batch):
                        found = passes.measure(batch, evaluation.metrics)
                    if has_batch and mesh.counts and found is not None:
                        sums.add(found)
        return sums.average()


_NONE_LEFT: Any = object()


def _add_over_ranks(values: list[bool], device: torch.device) -> list[float]:
    """The sums over all ranks; of one rank without the device, which need not come as far as this."""
    if dist.get_world_size() == 1:
        return list(map(float, values))
    flags = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(flags)
    return [float(flag) for flag in flags.tolist()]
