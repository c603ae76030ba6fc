"""Parameters that forward writes to, which only an unsharded model on one rank keeps: refused by name, or not moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from ....storage.suggestions import list_some
from ...errors import TrainerConfigError
from ..precision import local_part

_SHOWN = 5


def check_renormalised(model: nn.Module, zero: int, *, exchanges: bool) -> None:
    """Refuse embeddings that shorten the rows they look up where ranks exchange gradients, or keep shards.

    Each rank shortens the rows of its own batches: unsharded weights come apart, and in a gathered copy it is lost.
    """
    for name, module in model.named_modules():
        if (zero or exchanges) and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            where = f"parallel.zero={zero}" if zero else "several ranks"
            raise TrainerConfigError(
                f"embedding {name!r} has max_norm={module.max_norm}, with which forward writes to the weights of rows "
                f"that it looks up, and with {where} these writes do not come to all ranks; shorten what it returns "
                "instead, or train on one rank with parallel.zero=0"
            )


def keep_in_place(model: nn.Module) -> None:
    """Have recurrent layers of a sharded model compute with their weights where these are gathered.

    On CUDA they move weights that they have not seen before into one piece of memory, where none are gathered later.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _leave_in_place  # type: ignore[method-assign]


def _leave_in_place() -> None:
    """In the place of a recurrent layer's ``flatten_parameters``."""


class ForwardWrites:
    """Looks once whether forward writes to parameters of a sharded model: to a copy, which is lost.

    ``whole`` has them by name as forward sees them. What is written in later forwards only, or through ``.data`` in
    place, is not seen. Mutable state: whether it has looked.
    """

    def __init__(self, whole: Mapping[str, nn.Parameter]) -> None:
        self._whole: Mapping[str, nn.Parameter] | None = whole

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the first forward. Raises TrainerConfigError if it writes to a parameter."""
        if self._whole is None:
            yield
            return
        before = self._marks(self._whole)
        yield
        after = self._marks(self._whole)
        written = [name for name, mark in before.items() if after[name] != mark]
        self._whole = None
        if written:
            raise TrainerConfigError(
                f"forward writes to the parameters {list_some(written, _SHOWN)}, which are copies of what lies "
                "in shards, and what is written there is lost; keep what forward changes in buffers "
                "(register_buffer), change it between steps, or use parallel.zero=0"
            )

    def _marks(self, whole: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
        """Marks that a write changes: the version, or the memory where ``.data`` was assigned."""
        parts = ((name, local_part(one.detach())) for name, one in whole.items())
        return {name: (part._version, part.untyped_storage()._cdata) for name, part in parts}
