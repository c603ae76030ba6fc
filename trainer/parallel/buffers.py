"""One model on all ranks: rank 0's initial weights, and its buffers at all times, whatever the way of sharding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh
from ..ranks.world import World


@torch.no_grad()
def share_buffers(buffers: Iterable[Tensor], mesh: Mesh) -> None:
    """Make every rank's buffers those of the first rank of its stage; a collective of the stage, of one message."""
    if mesh.stage_ranks == 1:
        return
    # The widest first, so that each lies at a multiple of its element's size.
    members = sorted((distinct(one) for one in buffers if one.numel()), key=lambda one: -one.element_size())
    if not members:
        return
    flat = torch.cat([_as_bytes(one.to(mesh.world.device).contiguous()) for one in members])
    dist.broadcast(flat, group=mesh.stage_group, group_src=0)
    if not mesh.leads_stage:
        for one, part in zip(members, torch.split(flat, [one.nbytes for one in members]), strict=True):
            one.copy_(part.view(one.dtype).view_as(one))


def distinct(tensor: Tensor) -> Tensor:
    """A view of what can be written of a tensor: of one that was expanded, each element once."""
    return tensor.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def _as_bytes(contiguous: Tensor) -> Tensor:
    """(bytes,) uint8, a view: gloo has not all formats, and sends memory as it lies, whatever the strides."""
    return contiguous.reshape(-1).view(torch.uint8)


class BufferCopies:
    """Copies of a model's buffers, and which tensor is which: a forward may write to a buffer or assign another one."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else distinct(buffer).clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Make every buffer what it was, tensor and values."""
        for module, name, buffer, kept in self._kept:
            if buffer is not None and kept is not None:
                distinct(buffer).copy_(kept)
            module._buffers[name] = buffer


def copy_from_first_rank(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's weights and buffers, of what is not on the meta device; a collective.

    DDP does this on its own; FSDP2 would cut each rank's shard from that rank's own initial values.
    """
    copy_tensors((*model.parameters(), *model.buffers()), world)


@torch.no_grad()
def copy_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Give all ranks rank 0's values of tensors, of those that are not on the meta device; a collective."""
    if world.world_size > 1:
        for tensor in tensors:
            if not tensor.is_meta and tensor.numel():
                own = distinct(tensor)
                sent = own.contiguous()
                dist.broadcast(_as_bytes(sent), src=0)
                if sent.data_ptr() != own.data_ptr():
                    own.copy_(sent)


def synchronise_batch_norms(model: nn.Module, mesh: Mesh) -> None:
    """Replace the model's batch norms by ones that take their statistics over all replicas.

    Raises:
        TrainerConfigError: torch computes them on CUDA devices only; or the model has no batch norm.
    """
    key = "parallel.sync_batchnorm=True"
    device = mesh.world.device
    if device.type != "cuda":
        raise TrainerConfigError(f"{key}: torch has SyncBatchNorm for CUDA devices only and this is {device}")
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise TrainerConfigError(f"{key}: model={type(model).__name__} has no batch norm; leave it out")
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        raise TrainerConfigError(f"{key}: model={type(model).__name__} is a batch norm itself; wrap it in a module")
    nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.gradient_group)  # type: ignore[no-untyped-call]
