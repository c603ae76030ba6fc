"""Context parallelism: each rank of a replica computes a part of every sequence, and attention gathers the keys.

As in Llama 3 (Grattafiori et al. 2024, section 3.3.2), each rank keeps its queries, gathers the keys and values of all
parts, and sends the gradients of these back to where they belong. The local kernel is whichever torch chooses, so that
any device, mask and format will do; torch's ring attention has kernels for CUDA alone, and takes no masks, which packed
documents need. All else that a model does must be done to each token by itself, with the positions that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh

POSITIONS = "__positions__"
"""The field of a batch, (B, length of the part) int64, with which ``SequenceCut`` says what it took."""

_attend = F.scaled_dot_product_attention
_active: list[ContextCut] = []


@dataclass(frozen=True)
class Part:
    """This rank's part of a sequence, and where those of all ranks, one behind the other, belong.

    ``places`` are those of the part, (T / n,); ``order`` are the indices by which the parts come into the sequence's
    order, (T,), or None where they lie in it; ``runs`` are (begin, end, place after the last) of neighbours in it.
    """

    places: Tensor
    order: Tensor | None
    runs: tuple[tuple[int, int, int], ...]

    @property
    def length(self) -> int:
        return len(self.places)


class ContextCut:
    """The ranks along ``cp``, and how their parts make up the sequences.

    Mutable state: the parts of sequences of each length, learned from the first batch that has it, and that of the
    batch that is computed.
    """

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.device_mesh is not None, "cp > 1"
        self.parts = mesh.sizes.cp
        self._group: ProcessGroup = mesh.device_mesh.get_group("cp")
        self._by_length: dict[int, Part] = {}
        self._part: Part | None = None
        self.attended = 0

    @property
    def part(self) -> Part:
        assert self._part is not None, "a batch is computed"
        return self._part

    @contextmanager
    def computing(self, batch: Any) -> Iterator[None]:
        """Compute a loss, or a metric, of this rank's part of ``batch``; a collective of the parts' ranks.

        Raises:
            TrainerConfigError: the batch does not say what it is a part of; or attention was not seen, or takes what
                only holds for whole sequences.
        """
        self._part, self.attended = self._find_part(batch), 0
        with self.again():
            yield
        if not self.attended:
            raise TrainerConfigError(
                f"parallel.cp={self.parts}: forward called F.scaled_dot_product_attention nowhere, so that no token "
                "saw those on other ranks; compute attention by it, or use parallel.cp=1"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Attend over all parts, also where a block runs again in backward."""
        _active.append(self)
        try:
            with _Attention(self):
                yield
        finally:
            _active.pop()

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole along ``dim``, in the sequence's order; its gradient goes to where the parts came from."""
        found: Tensor = _Gathered.apply(tensor, dim, self._group, self.part.order)  # type: ignore[no-untyped-call]
        return found

    def _find_part(self, batch: Any) -> Part:
        places = batch.get(POSITIONS) if isinstance(batch, Mapping) else None
        if not isinstance(places, Tensor) or places.ndim != 2:
            raise TrainerConfigError(
                f"parallel.cp={self.parts} trains on parts of sequences, and the batch has no {POSITIONS!r} to say "
                "which; give DistributedDataLoader(mesh=mesh.device_mesh, sequence_cut=SequenceCut([...])), with "
                "labels that are shifted before, or add the place of each token in its sequence, (B, length) int64"
            )
        length = places.shape[1]
        if length in self._by_length:
            return self._by_length[length]
        found = self._learn(places)
        if len(places):  # one without rows does not tell
            self._by_length[length] = found
        return found

    def _learn(self, places: Tensor) -> Part:
        """The parts of all ranks; reads them on the host."""
        own = places[0] if len(places) else torch.full((places.shape[1],), -1, device=places.device)
        everyones = [torch.empty_like(own) for _ in range(self.parts)]
        dist.all_gather(everyones, own.contiguous(), group=self._group)
        flat = torch.cat(everyones)
        total = len(flat)
        if len(places) and flat.sort().values.tolist() != list(range(total)):
            raise TrainerConfigError(
                f"parallel.cp={self.parts}: the parts of a sequence on the ranks, by {POSITIONS!r}, do not make up one "
                f"of {total} tokens; give each rank another part, as SequenceCut along the mesh's cp does"
            )
        order = flat.argsort()
        at = own.tolist()
        ends = [index for index, (one, following) in enumerate(pairwise(at), 1) if following != one + 1]
        bounds = list(pairwise([0, *ends, len(at)]))
        is_in_order = bool((order == torch.arange(total, device=order.device)).all())
        return Part(own, None if is_in_order else order, tuple((first, end, at[end - 1] + 1) for first, end in bounds))


def sequence_places(length: int, device: torch.device) -> Tensor:
    """(length,) int64: the place of each token in its sequence, also where this rank computes a part of it."""
    return _active[-1].part.places if _active else torch.arange(length, device=device)


def whole_sequence(tensor: Tensor, dim: int = 1) -> Tensor:
    """The tensor over the whole sequence, in its order, of one over this rank's part; elsewhere as it is."""
    return _active[-1].gather(tensor, dim) if _active else tensor


def active_cut() -> ContextCut | None:
    """The cut of the sequences that are computed now."""
    return _active[-1] if _active else None


class _Attention(TorchFunctionMode):
    """Has attention see the keys of all parts."""

    def __init__(self, cut: ContextCut) -> None:
        super().__init__()
        self._cut = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _attend:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attend_inside(func, args, kwargs)
        return func(*args, **kwargs)

    def _attend_inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Torch's own module, which comes to the kernel in here: no mode is asked there."""
        if kwargs.get("need_weights", True):
            raise TrainerConfigError(
                f"parallel.cp={self._cut.parts}: a MultiheadAttention with need_weights=True computes attention "
                "within a part of the sequence; call it with need_weights=False"
            )
        kept = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attend  # type: ignore[assignment]
        try:
            return func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = kept

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        cut, part = self._cut, self._cut.part
        where = f"parallel.cp={cut.parts}: F.scaled_dot_product_attention got"
        if query.shape[-2] != part.length or key.shape[-2] != part.length:
            raise TrainerConfigError(
                f"{where} {query.shape[-2]} queries and {key.shape[-2]} keys, where this rank's part of the sequences "
                f"has {part.length} tokens; with cp, attention is of each sequence over itself"
            )
        cut.attended += 1
        if attn_mask is not None and attn_mask.shape[-2] == 1 and attn_mask.shape[-1] == part.length:
            attn_mask = cut.gather(attn_mask, -1)  # a mask of keys
        total = part.length * cut.parts
        if attn_mask is not None and attn_mask.shape[-1] != total:
            raise TrainerConfigError(
                f"{where} a mask of shape {tuple(attn_mask.shape)}, over this rank's part of the sequences alone; make "
                f"it of all {total} keys, as with penstock.trainer.whole_sequence and sequence_places"
            )
        key, value = cut.gather(key, -2), cut.gather(value, -2)
        if not is_causal:
            return _attend(query, key, value, attn_mask, dropout_p, **more)
        if attn_mask is not None:
            raise TrainerConfigError(f"{where} a mask and is_causal=True; put both into the mask")
        pieces = [
            _attend(
                query[..., first:end, :],
                key[..., :stop, :],
                value[..., :stop, :],
                causal_lower_right(end - first, stop),
                dropout_p,
                **more,
            )
            for first, end, stop in part.runs
        ]
        return torch.cat(pieces, dim=-2)


class _Gathered(torch.autograd.Function):
    """Parts of all ranks along a dimension, in the sequence's order; gradients are added up in fp32, where wider."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup, order: Tensor | None) -> Tensor:
        ctx.dim, ctx.group, ctx.order = dim, group, order
        sent = part.view(torch.uint8) if part.dtype == torch.bool else part
        parts = [torch.empty_like(sent, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, sent.contiguous(), group=group)
        whole = torch.cat(parts, dim=dim).view(part.dtype)
        return whole if order is None else whole.index_select(dim, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        wide = gradient.float() if gradient.element_size() < 4 else gradient
        if ctx.order is not None:
            wide = torch.empty_like(wide).index_copy_(ctx.dim, ctx.order, wide)
        parts = [one.contiguous() for one in wide.chunk(ctx.group.size(), dim=ctx.dim)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own.to(gradient.dtype), None, None, None
