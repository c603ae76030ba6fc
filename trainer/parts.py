"""Parts of a training step: the model on all ranks, its optimizer, schedule and compression, and the step's runner."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .compression.compression import Compression
from .computing import ComputeClock
from .config import TrainerConfig
from .data.batches import find_rows
from .parallel.activation import compile_model, recompute_activations
from .parallel.materialise import Initialiser
from .parallel.model import OptimizerFactory, ParallelModel
from .parallel.passes import Passes, PlainPasses
from .parallel.pipeline.passes import PipelinePasses
from .parallel.pipeline.pipeline import Pipeline, Rows
from .parallel.spread import ReplicaSpread
from .ranks.mesh import Mesh
from .run.length import effective_batch_size
from .steps.loss import LossFunction
from .steps.microbatches import Microbatches, cut_batch
from .steps.probe import MemoryProbe, describe_memory, find_batch_norms
from .steps.schedule import Schedule
from .steps.step import StepRunner
from .stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one trainer, which hold one another; each has a file of its own."""

    parallel: ParallelModel
    passes: Passes
    optimizer: Optimizer
    schedule: Schedule
    compression: Compression
    steps: StepRunner
    microbatches: Microbatches


def find_spread(config: TrainerConfig, model: nn.Module, mesh: Mesh) -> tuple[ReplicaSpread | None, Pipeline | None]:
    """Find what cuts the model over the ranks of each replica, None where these are single ranks; and its stages.

    Raises:
        TrainerConfigError: the model cannot be cut so.
    """
    parallel = config.parallel
    if not mesh.is_spread:
        return None, None
    pipeline = None
    if parallel.pp > 1:
        pipeline = Pipeline(model, parallel, mesh, Rows(count=find_rows, cut=cut_batch))
        pipeline.check_split(config.activation.every, compiled=config.compile.enabled)
    return ReplicaSpread(model, parallel, mesh, pipeline), pipeline


def make_parts(
    config: TrainerConfig,
    mesh: Mesh,
    stopwatch: Stopwatch,
    model: nn.Module,
    optimizer: Optimizer | OptimizerFactory,
    loader: Iterable[Any],
    *,
    loss: LossFunction,
    initialise: Initialiser | None,
    total_steps: int | None,
    clock: ComputeClock | None,
) -> Parts:
    """Spread the model over the ranks and make the rest around it, in the one order that works; a collective.

    ``clock``, where there is one, measures what this rank computes.
    """
    world = mesh.world
    spread, pipeline = find_spread(config, model, mesh)
    compile_model(model, config.compile, config.parallel, world, config.activation)
    recompute_activations(model, config.activation)
    parallel = ParallelModel(
        model,
        config.parallel,
        config.precision,
        mesh,
        exchange=config.averaging is None,
        exchange_once=config.compression.remembers,
        scheme=config.compression.scheme,
        seed=config.seed,
        initialise=initialise,
        spread=spread,
        stages_of=None if pipeline is None else pipeline.stages_of(),
    )
    if spread is not None:
        loss = spread.watch_loss(loss)
    adopted = parallel.adopt_optimizer(optimizer)
    if pipeline is not None:
        parallel.stages = pipeline.agree_on_names(adopted)
    schedule = Schedule(
        config.schedule,
        adopted,
        total_updates=total_steps or 0,
        effective_batch_size=effective_batch_size(loader, config, mesh.replicas, mesh.learners),
    )
    if clock is not None:
        clock.listen(parallel.module)
    compression = Compression(parallel.module, adopted, config.compression, world, clock=clock)
    is_owed = config.compression.remembers and world.world_size > parallel.copies
    computing = nullcontext if clock is None else clock.computing
    passes: Passes
    if pipeline is None:
        passes = PlainPasses(parallel, config.precision, stopwatch.phase, computing)
    else:
        passes = PipelinePasses(pipeline, parallel, config.precision, stopwatch.phase)
    steps = StepRunner(
        parallel,
        adopted,
        loss,
        passes=passes,
        config=config.step,
        precision=config.precision,
        phase=stopwatch.phase,
        correct=compression.begin_exchange if is_owed else None,
        is_saved=config.keeps_checkpoints,
    )
    probe = MemoryProbe(parallel, adopted, loss, config.precision)
    return Parts(
        parallel=parallel,
        passes=passes,
        optimizer=adopted,
        schedule=schedule,
        compression=compression,
        steps=steps,
        microbatches=Microbatches(
            config.step,
            loader,
            world,
            fits=probe.fits,
            memory=describe_memory(world.device, config.precision, config.activation),
            remark=find_batch_norms(model),
        ),
    )
