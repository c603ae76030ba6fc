"""The names, shapes and first values of what a server holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ServerRefusedError, TrainerConfigError
from . import placement
from .placement import PIECE_BYTES, bucket_of_piece, mix, stable_hash


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A dense fp32 tensor, cut into pieces of ``piece`` elements."""

    name: str
    shape: tuple[int, ...]
    piece: int = PIECE_BYTES // 4

    def __post_init__(self) -> None:
        if self.piece < 1 or any(size < 0 for size in self.shape):
            raise TrainerConfigError(f"tensor {self.name!r}: piece={self.piece} and shape={self.shape} are no sizes")

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return -(-self.size // self.piece)

    def piece_size(self, index: int) -> int:
        """The number of elements of a piece.

        Raises:
            ServerRefusedError: there is no such piece.
        """
        if not 0 <= index < self.pieces:
            raise ServerRefusedError(f"tensor {self.name!r} has pieces 0 to {self.pieces - 1}, and not {index}")
        return min(self.piece, self.size - index * self.piece)


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table of fp32 rows by id; a row never pushed to is uniform in [-scale, scale), by (seed, name, id) alone."""

    name: str
    width: int
    seed: int = 0
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 1 or not (math.isfinite(self.scale) and self.scale >= 0):
            raise TrainerConfigError(f"table {self.name!r}: width={self.width} and scale={self.scale} are no sizes")

    def first_rows(self, ids: NDArray[np.int64]) -> Tensor:
        """Make the first values (n, width) of the rows with these ids (n,), fp32."""
        if self.scale == 0:
            return torch.zeros(len(ids), self.width)
        of_rows = mix(ids.astype(np.uint64) ^ np.uint64(stable_hash(f"first {self.seed} {self.name}")))
        of_values = mix(of_rows[:, None] + np.arange(self.width, dtype=np.uint64)[None])
        units = (of_values >> np.uint64(41)).astype(np.float64) / 2.0**22 - 1  # 23 bits: exact in fp32
        return torch.from_numpy((units * self.scale).astype(np.float32))


class Schema:
    """All tensors and tables of a run; ``digest`` is a hash of all of it.

    Raises:
        TrainerConfigError: a name comes twice.
    """

    def __init__(self, tensors: Sequence[TensorSpec] = (), tables: Sequence[TableSpec] = ()) -> None:
        self.tensors, self.tables = tuple(tensors), tuple(tables)
        specs: list[TensorSpec | TableSpec] = [*self.tensors, *self.tables]
        self.by_name: dict[str, TensorSpec | TableSpec] = {spec.name: spec for spec in specs}
        if len(self.by_name) < len(specs):
            names = [spec.name for spec in specs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise TrainerConfigError(f"a parameter server holds each name once, and these come twice: {twice}")
        described = [[type(spec).__name__, asdict(spec)] for spec in specs]
        self.digest = f"{stable_hash(json.dumps(described, sort_keys=True)):016x}"

    def buckets(self) -> NDArray[np.int64]:
        """The buckets (n,), in order, that can hold something: those of pieces, or all where there is a table."""
        if self.tables:
            return np.arange(placement.BUCKETS)
        return np.array(sorted(set(self.places().values())), np.int64)

    def places(self) -> dict[tuple[str, int], int]:
        """The bucket of each piece, by tensor and index."""
        keys = ((spec.name, index) for spec in self.tensors for index in range(spec.pieces))
        return {key: bucket_of_piece(*key) for key in keys}

    def tensor(self, name: str) -> TensorSpec:
        """Look up a tensor.

        Raises:
            ServerRefusedError: there is none of that name.
        """
        spec = self.by_name.get(name)
        if not isinstance(spec, TensorSpec):
            raise ServerRefusedError(f"the server holds no tensor {name!r}; it was started for another model")
        return spec

    def table(self, name: str) -> TableSpec:
        """Look up a table.

        Raises:
            ServerRefusedError: there is none of that name.
        """
        spec = self.by_name.get(name)
        if not isinstance(spec, TableSpec):
            raise ServerRefusedError(f"the server holds no table {name!r}; it was started for another model")
        return spec
