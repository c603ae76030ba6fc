"""Spreading of each replica over several ranks: cuts of its weights and sequences, and what computing it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerConfigError, TrainerError
from ..imports import describe_error
from ..ranks.mesh import Mesh
from .checks.peers import PeersCheck
from .config import ParallelConfig
from .context import ContextCut
from .experts import check_experts, spread_experts
from .pipeline.ghosts import Ghost
from .pipeline.pipeline import Pipeline
from .tensor import TensorPlan, spread_losses

Loss = Callable[[nn.Module, Any], Any]

_MIXED = "mixed torch.Tensor and DTensor"


class ReplicaSpread:
    """Cuts a replica along pp, tp and cp of ``mesh``, and experts along ep. Its parts have the mutable state.

    Raises:
        TrainerConfigError: the model cannot be cut as ``config`` says.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, mesh: Mesh, pipeline: Pipeline | None = None) -> None:
        assert mesh.device_mesh is not None, "a replica lies on several ranks"
        self._pipeline = pipeline
        self._tp = config.tp
        self._plan = TensorPlan(model, config) if config.tp > 1 else None
        if self._plan is not None and pipeline is not None:
            pipeline.staged.change_shapes(self._plan.shape_changes())
        self._peers = PeersCheck(mesh.device_mesh["tp"]) if config.tp > 1 else None
        self._context = ContextCut(mesh) if config.cp > 1 else None
        if mesh.sizes.ep > 1:
            check_experts(model, mesh.sizes.ep)

    def cut(self, modules: Collection[nn.Module], mesh: Mesh) -> None:
        """Cut the weights of modules, the model's own last, which are the same on all ranks; they become DTensors.

        Of modules of other stages a rank of a pipeline keeps nothing.
        """
        if self._pipeline is not None:
            self._pipeline.spread(modules)
        if self._plan is not None:
            assert mesh.device_mesh is not None, "a replica lies on several ranks"
            with nullcontext() if self._pipeline is None else self._pipeline.staged.passing_ghosts():
                is_here = None if self._pipeline is None else self._pipeline.has
                self._plan.cut(mesh.device_mesh["tp"], is_here, modules=modules)
        if mesh.sizes.ep > 1:
            spread_experts(modules, mesh)

    @contextmanager
    def computing(self, batch: Any) -> Iterator[None]:
        """Run forward and backward, or metrics, of this rank's part of ``batch``; a collective of the replica."""
        with nullcontext() if self._context is None else self._context.computing(batch), spread_losses(self._plan):
            yield

    def watch_loss(self, loss: Loss) -> Loss:
        """The same loss, whole on each rank, which in the first step is compared with those of the others."""
        plan, peers = self._plan, self._peers
        if plan is None or peers is None:
            return loss

        def compute(model: nn.Module, batch: Any) -> Any:
            with self._named_if_it_does_not_fit():
                found = loss(model, batch)
            if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
                return found
            if isinstance(found[0], Ghost):  # a stage without the loss, or a rehearsal
                return found
            total, count = (
                one.full_tensor() if isinstance(one, DTensor) and plan.cuts_losses else one for one in found
            )
            if total.ndim == 0 and not isinstance(total, DTensor):
                peers.see_loss(total)
            return total, count

        return compute

    def check_gradients(self, model: nn.Module) -> None:
        """Compare the first step's gradients of what no rank has a part of; a collective then.

        Raises:
            TrainerConfigError: on every rank of the replica, if they differ.
        """
        if self._peers is not None:
            self._peers.see_gradients(model.named_parameters())
            self._peers.has_loss = True  # stages but the last have none

    @contextmanager
    def _named_if_it_does_not_fit(self) -> Iterator[None]:
        """Say of torch's errors about shapes, in the first loss, that they may be the plan's."""
        assert self._plan is not None, "weights are cut"
        assert self._peers is not None, "weights are cut"
        try:
            yield
        except (TrainerError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, IndexError, ValueError) as exc:
            if self._plan.cuts_losses and _MIXED in str(exc):
                raise TrainerConfigError(
                    "parallel.plan: the loss takes scores that are cut by classes, of which F.cross_entropy alone can "
                    'be computed: use that, or gather them, by "colwise_gathered" in the place of "loss". Torch says: '
                    f"{str(exc).splitlines()[0]}"
                ) from exc
            if self._peers.has_loss:
                raise
            raise TrainerConfigError(
                f"the first loss with parallel.tp={self._tp} raised {describe_error(exc)}. If it does not with "
                "parallel.tp=1, parallel.plan cuts what forward or the loss takes for the whole, or leaves whole what "
                'they take for a part: "colwise" comes before "rowwise", and what is read in between must take as many '
                "columns as there are"
            ) from exc
