"""Bytes that one rank holds and sends in a training step, counted while it runs: storages of tensors, not pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.trainer.parallel.model import ParallelModel
from penstock.trainer.parallel.pipeline.passes import list_groups

OTHER = "other"
"""In place of a dimension: sums of losses and norms, in fp64 or whole numbers, and what goes over no known group."""


class StepAccount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at weights and gradients after each operator, and adds up what collectives send.

    A collective over n ranks is counted as a ring, as the planner does. ``peaks`` are bytes of ``weights``, sharded and
    gathered ones together; ``gradients``, with buffers in which they are exchanged; and ``activations``, tensors that
    autograd keeps. ``sent`` has bytes by dimension.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks = dict.fromkeys(("weights", "gradients", "activations"), 0)
        self.sent: dict[str, float] = {}
        self._parallel = parallel
        self._parameters = list(parallel.inner.parameters())
        groups = [
            one._get_fsdp_state()._fsdp_param_group for one in parallel.inner.modules() if isinstance(one, FSDPModule)
        ]
        self._groups: list[Any] = [one for one in groups if one is not None]
        self._shards = [one for group in self._groups for one in group.fsdp_params]
        self._dims = _name_groups(parallel)
        self._kept: dict[int, list[int]] = {}  # storages that autograd keeps: how often, and bytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens within."""
        with self, saved_tensors_hooks(self._pack, lambda one: one.tensor if isinstance(one, _Kept) else one):
            yield

    @property
    def parameters(self) -> int:
        """Numbers of weights that the rank computes with, whole or gathered."""
        sharded: int = sum(one._orig_size.numel() for one in self._shards)
        whole = {id(one.sharded_param) for one in self._shards}
        return sharded + sum(_local(one).numel() for one in self._parameters if id(one) not in whole)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # until it comes to the parts
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._count(name.partition("::")[2], args, result)
        self._look()
        return result

    def _look(self) -> None:
        gathered = [output for one in self._shards for output in one.all_gather_outputs]
        coming = (group._all_gather_result for group in self._groups)
        gathered += [one.all_gather_output for one in coming if one is not None]
        gradients: list[Any] = [one.grad for one in self._parameters]
        gradients += [one.unsharded_accumulated_grad for one in self._shards]
        gradients += [one._unsharded_param.grad for one in self._shards if hasattr(one, "_unsharded_param")]
        gradients += [
            state.reduce_scatter_input for group in self._groups[:1] for state in group.comm_ctx.reduce_scatter_states
        ]
        local_exchange = self._parallel._local_exchange
        gradients += [] if local_exchange is None else [flat for _, flat, _ in local_exchange._sent]
        self._note("weights", _bytes_of([*self._parameters, *gathered]))
        self._note("gradients", _bytes_of(gradients))

    def _note(self, what: str, amount: int) -> None:
        self.peaks[what] = max(self.peaks[what], amount)

    def _pack(self, tensor: Tensor) -> Any:
        storage = _local(tensor).untyped_storage()
        own = (*self._parallel.inner.parameters(), *self._parallel.inner.buffers())  # gathered ones where they are
        if any(_local(one).untyped_storage()._cdata == storage._cdata for one in own):
            return tensor
        kept = _Kept(tensor, storage._cdata, self._kept)
        count = self._kept.setdefault(storage._cdata, [0, storage.nbytes()])
        count[0] += 1
        self._note("activations", sum(size for _, size in self._kept.values()))
        return kept

    def _count(self, name: str, args: Any, result: Any) -> None:
        is_functional = isinstance(args[-1], str)
        if not is_functional and not any(isinstance(one, torch.ScriptObject) for one in args):
            return  # a wait, or a wrapping of what will come
        if is_functional:
            group = _resolve_process_group(args[-1])
            tensors, splits = [args[0], result], args[2] if name == "all_to_all_single" else None
        else:
            group = dist.ProcessGroup.unbox(next(one for one in args if isinstance(one, torch.ScriptObject)))
            tensors, splits = list(_tensors_in(args)), args[4] if name == "alltoall_base_" else None
        largest = max(_tensors_in(tensors), key=lambda one: one.nbytes, default=None)
        if largest is None:
            return
        whole = max(_size(one) for one in ([args[0], result] if is_functional else args))
        others = 1 - 1 / group.size()
        if splits:
            rows = sum(size for rank, size in enumerate(splits) if rank != group.rank())
            given = args[0] if is_functional else args[1]
            amount = float(rows * given[:1].nbytes)
        elif name.startswith(("allreduce", "all_reduce")):
            amount = 2 * others * whole
        elif name.startswith("recv"):
            amount = 0.0
        elif name.startswith(("send", "broadcast")):
            amount = float(whole)
        else:  # gathers, scatters, and exchanges of equal parts
            amount = others * whole
        is_sum = largest.dtype in (torch.float64, torch.int64, torch.int32) and not name.startswith("all_to_all")
        is_sum = is_sum and not name.startswith("alltoall")
        dim = OTHER if is_sum else self._dim_of(group)
        if dim == "ep" and not name.startswith(("alltoall", "all_to_all")):
            dim = "dp"  # where experts are spread over all replicas both have one group
        self.sent[dim] = self.sent.get(dim, 0.0) + amount

    def _dim_of(self, group: Any) -> str:
        if group.group_name in self._dims:
            return self._dims[group.group_name]
        # DTensor may go on with the groups of an equal mesh that was made before.
        mesh = self._parallel.mesh.device_mesh
        own = [] if mesh is None else dist.get_process_group_ranks(mesh.get_group("tp"))
        return "tp" if dist.get_process_group_ranks(group) == own else OTHER


class _Kept:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, key: int, counts: dict[int, list[int]]) -> None:
        self.tensor, self._key, self._counts = tensor, key, counts

    def __del__(self) -> None:
        count = self._counts[self._key]
        count[0] -= 1
        if not count[0]:
            del self._counts[self._key]


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yield a list that has, at the end, the most bytes that torch's CPU allocator gave out within."""
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        yield found
    results: Any = run.profiler
    events = sorted((one for one in results.kineto_results.events() if one.name() == "[memory]"), key=_start)
    held = most = 0
    for one in events:
        held += one.nbytes()
        most = max(most, held)
    found.append(most)


def _start(event: Any) -> int:
    return int(event.start_ns())


def held_between_steps(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that a rank holds between two steps: ``weights``, ``optimizer``, ``buffers``, and ``buckets`` of DDP."""
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if isinstance(value, Tensor)]
    is_ddp = isinstance(parallel.module, DistributedDataParallel)
    trained = [one for one in parallel.inner.parameters() if one.requires_grad]
    return {
        "weights": _bytes_of(parallel.inner.parameters()),
        "optimizer": _bytes_of([one for one in state if one.ndim]),
        "buffers": _bytes_of(parallel.inner.buffers()),
        "buckets": sum(one.nbytes for one in trained) if is_ddp else 0,
    }


def _name_groups(parallel: ParallelModel) -> dict[str, str]:
    """The dimension that each group's traffic belongs to."""
    mesh = parallel.mesh
    named: dict[str, str] = {}
    for group, dim in ((mesh.stage_group, "dp"), (mesh.gradient_group, "dp"), (mesh.pipeline_group, "pp")):
        if group is not None:
            named[group.group_name] = dim
    if mesh.device_mesh is None:
        named[dist.group.WORLD.group_name] = "dp"  # type: ignore[union-attr]
    else:
        for dim in ("tp", "cp"):
            named[mesh.device_mesh.get_group(dim).group_name] = dim
    for group in (one.mesh_info for one in _groups_of(parallel)):
        named[group.shard_process_group.group_name] = "dp"
    if mesh.expert_mesh is not None and mesh.expert_replicas is not None:
        named[mesh.expert_mesh.get_group().group_name] = "ep"
        named[mesh.expert_replicas.get_group().group_name] = "dp"
    return named


def _groups_of(parallel: ParallelModel) -> Iterator[Any]:
    for module in parallel.inner.modules():
        if isinstance(module, FSDPModule):
            yield from list_groups(module._get_fsdp_state())


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensors: Any) -> int:
    """Bytes of the storages of tensors, each once; None is none."""
    storages = {}
    for one in tensors:
        if one is not None:
            storage = _local(one).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors_in(one)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
