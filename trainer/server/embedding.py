"""An embedding whose table lies on the servers: rows are pulled by id, and their gradients pushed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ..errors import TrainerConfigError
from .schema import TableSpec

PullRows = Callable[[str, NDArray[np.int64]], Tensor]
"""(table, ids (n,), ascending and distinct) -> rows (n, width), fp32."""


class ServerEmbedding(nn.Module):
    """Looks up rows of a table that lies on the servers of ``parallel.mode="parameter_server"``.

    ``table`` is its name, ``width`` the length of a row. Ids are any int64 numbers: a table has no size. A row that was
    never pushed to is uniform in [-scale, scale), a function of (seed, table, id) alone. ``forward`` takes ids of any
    shape and returns (*shape, width) fp32. The module has no parameters: only rows that a batch uses are in memory, and
    only these are stepped, by the recipe's optimizer without its weight decay.

    Rows of batches to come are pulled ahead where the model has a method ``lookups(batch)`` that returns the ids of
    each table; others are pulled when forward asks for them. A module that no worker has bound refuses to run.

    All mutable state: how to pull, rows that were pulled ahead, and the rows that this step has used.

    Raises:
        TrainerConfigError: the width or the scale is no size.
    """

    def __init__(self, table: str, width: int, seed: int = 0, *, scale: float = 0.1) -> None:
        super().__init__()
        self.spec = TableSpec(name=table, width=width, seed=seed, scale=scale)
        self._pull: PullRows | None = None
        self._ahead: tuple[NDArray[np.int64], Tensor] | None = None
        self._used: list[tuple[NDArray[np.int64], Tensor]] = []

    def extra_repr(self) -> str:
        """Describe the table, as in ``print(model)``."""
        return f"{self.spec.name!r}, width={self.spec.width}"

    def bind(self, pull: PullRows | None) -> None:
        """Pull rows by this function from now on; None: not at all."""
        self._pull, self._ahead, self._used = pull, None, []

    def hold(self, ids: NDArray[np.int64], rows: Tensor) -> None:
        """Keep rows (n, width) of ascending, distinct ids (n,) for the next step; those held before are let go."""
        self._ahead = ids, rows

    def forward(self, ids: Tensor) -> Tensor:
        """Look up rows by ids of any shape.

        Raises:
            TrainerConfigError: no worker has bound this module to servers.
        """
        wanted, places = np.unique(ids.detach().cpu().numpy().astype(np.int64).ravel(), return_inverse=True)
        rows = self._find(wanted).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((wanted, rows))
        return F.embedding(torch.from_numpy(places.reshape(tuple(ids.shape))).to(ids.device), rows)

    def take_gradients(self) -> tuple[NDArray[np.int64], Tensor] | None:
        """Take the gradients of the rows that were used since: ids (n,), which may repeat, and (n, width)."""
        used, self._used, self._ahead = self._used, [], None
        found = [(ids, rows.grad) for ids, rows in used if rows.grad is not None]
        if not found:
            return None
        gradients = torch.cat([gradient.detach().cpu() for _, gradient in found])
        return np.concatenate([ids for ids, _ in found]), gradients

    def _find(self, wanted: NDArray[np.int64]) -> Tensor:
        """Return a new tensor of the rows of ascending, distinct ids."""
        if self._pull is None:
            raise TrainerConfigError(
                f"table {self.spec.name!r} lies on servers, and there are none; train with "
                "parallel.mode='parameter_server', or use nn.Embedding"
            )
        if self._ahead is None:
            return self._pull(self.spec.name, wanted).clone()
        held, rows = self._ahead
        places = np.searchsorted(held, wanted)
        places[places == len(held)] = 0
        is_held = held[places] == wanted if len(held) else np.zeros(len(wanted), bool)
        if is_held.all():
            return rows[torch.from_numpy(places)]
        found = torch.empty(len(wanted), self.spec.width)
        found[torch.from_numpy(is_held)] = rows[torch.from_numpy(places[is_held])]
        found[torch.from_numpy(~is_held)] = self._pull(self.spec.name, wanted[~is_held])
        return found


def find_tables(model: nn.Module) -> dict[str, ServerEmbedding]:
    """Find the tables of a model by name.

    Raises:
        TrainerConfigError: two modules are of one table; share one module instead.
    """
    found: dict[str, ServerEmbedding] = {}
    for name, module in model.named_modules():
        if isinstance(module, ServerEmbedding):
            if module.spec.name in found:
                raise TrainerConfigError(
                    f"{name} is a second module of table {module.spec.name!r}; use one module in both places, or give "
                    "the tables names of their own"
                )
            found[module.spec.name] = module
    return found
