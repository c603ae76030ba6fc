"""How each replica lies on several ranks: what cuts its weights and sequences, and what computing it so needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh
from .checks.peers import PeersCheck
from .config import ParallelConfig
from .context import ContextCut
from .pipeline.pipeline import Pipeline
from .tensor import TensorPlan, spread_losses

Loss = Callable[[nn.Module, Any], Any]

_MIXED = "mixed torch.Tensor and DTensor"


class ReplicaSpread:
    """Cuts a replica over the ranks of ``mesh`` along pp, tp and cp. Its parts have the mutable state.

    Raises:
        TrainerConfigError: the model cannot be cut as ``config`` says.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, mesh: Mesh, pipeline: Pipeline | None = None) -> None:
        assert mesh.device_mesh is not None, "a replica lies on several ranks"
        self._pipeline = pipeline
        self._plan = TensorPlan(model, config) if config.tp > 1 else None
        self._peers = PeersCheck(mesh.device_mesh["tp"]) if config.tp > 1 else None
        self._context = ContextCut(mesh) if config.cp > 1 else None

    def cut(self, mesh: Mesh) -> None:
        """Cut the weights of the model, which are the same on all ranks; those that are cut become DTensors."""
        if self._pipeline is not None:
            self._pipeline.spread()
        if self._plan is not None:
            assert mesh.device_mesh is not None, "a replica lies on several ranks"
            self._plan.cut(mesh.device_mesh["tp"])

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
            with _named_if_mixed(plan):
                found = loss(model, batch)
            if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
                return found
            total, count = found
            if plan.cuts_losses and isinstance(total, DTensor):
                total = total.full_tensor()
            if isinstance(count, DTensor):
                count = count.full_tensor()
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


@contextmanager
def _named_if_mixed(plan: TensorPlan) -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        if _MIXED not in str(exc):
            raise
        cure = (
            "the loss takes scores that are cut by classes, of which F.cross_entropy alone can be computed: use that, "
            'or gather them, by "colwise_gathered" in the place of "loss"'
            if plan.cuts_losses
            else "forward uses a weight that the plan cuts outside of its module, or what a module of the plan returns "
            "as a DTensor: give that module a style whose output is local"
        )
        raise TrainerConfigError(f"parallel.plan: {cure}. Torch says: {str(exc).splitlines()[0]}") from exc
