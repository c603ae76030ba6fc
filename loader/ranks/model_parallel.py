"""A process's part of a batch where a model is cut: the fields that a stage reads, and a part of the sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ...storage.suggestions import did_you_mean, unknown_choice
from ..errors import ConfigError
from .detect import CONTEXT_DIMS, PIPELINE_DIMS, find_place_in_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Stage = Literal["first", "last"] | int
FieldsByStage = Mapping[str, Stage | Sequence[Stage]]
"""Stages of a pipeline that read a field, by its name: "first", "last", a number from 0, or several of these."""

_NAMED: dict[object, int] = {"first": 0, "last": -1}


@dataclass(frozen=True, kw_only=True)
class StageFields:
    """The fields that not all stages read: ``stages`` maps each to those that do. This process is in ``stage``.

    A stage is a place along the mesh's pipeline dimension, from 0.
    """

    stages: Mapping[str, frozenset[int]]
    stage: int
    count: int

    @staticmethod
    def read(
        fields_by_stage: FieldsByStage | None,
        mesh: DeviceMesh | None,
        data_dims: Sequence[str] | None,
        *,
        max_bad_chunks: int = 0,
        may_drop: bool = False,
        keeps_by_all: bool = False,
    ) -> StageFields | None:
        """Read the argument; None if it is not given.

        Raises:
            ConfigError: it is no mapping to stages, the mesh has no pipeline dimension or no such stage; or stages
                could come to deliver different samples, since what they read decides on replacements or drops.
        """
        if fields_by_stage is None:
            return None
        if not isinstance(fields_by_stage, Mapping) or not fields_by_stage:
            raise ConfigError(
                f"fields_by_stage={fields_by_stage!r}: must be a mapping, such as "
                "{'tokens': 'first', 'labels': 'last'}"
            )
        if max_bad_chunks:
            raise ConfigError(
                f"fields_by_stage= with max_bad_chunks={max_bad_chunks}: a stage that does not read a damaged field "
                "would not replace its chunk, and stages would train on different samples; leave out one of the two"
            )
        if may_drop or keeps_by_all:
            who = "may_drop=True: a transform" if may_drop else "keep= of all fields: a function"
            raise ConfigError(
                f"fields_by_stage= with {who} that sees different fields on different stages could drop different "
                "samples; leave out one of the two, or drop by keep=Keep([columns], predicate)"
            )
        stage, count = find_place_in_mesh(mesh, data_dims, argument="fields_by_stage=", usual=PIPELINE_DIMS)
        stages = {name: _read_stages(name, given, count) for name, given in fields_by_stage.items()}
        return StageFields(stages=stages, stage=stage, count=count)

    def choose(self, fields: Sequence[str], columns: Sequence[str] | None) -> list[str]:
        """Those of ``columns``, or of all ``fields`` of the data set, that this stage reads; perhaps none.

        Raises:
            ConfigError: a field named by stage is not among them.
        """
        known = [name for name in fields if columns is None or name in columns]
        unknown = [name for name in self.stages if name not in known]
        if unknown:
            where = "the data set's fields" if columns is None else "columns="
            raise ConfigError(
                f"fields_by_stage= names {unknown}, which {where} {sorted(known)} do not hold"
                f"{did_you_mean(unknown, known)}"
            )
        chosen = fields if columns is None else columns
        return [name for name in chosen if self.stage in self.stages.get(name, {self.stage})]


def _read_stages(field: str, given: object, count: int) -> frozenset[int]:
    """The stages of a field, each from 0 to ``count - 1``."""
    several = given if isinstance(given, list | tuple | set | frozenset) else [given]
    found = set()
    for one in several:
        number = _NAMED.get(one, one) if isinstance(one, str) else one
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(
                f"fields_by_stage[{field!r}]={given!r}: stages are 'first', 'last' or whole numbers"
                f"{did_you_mean(number, _NAMED)}"
            )
        if not -count <= number < count:
            raise ConfigError(
                f"fields_by_stage[{field!r}]={given!r}: the mesh has {count} stages, 0 to {count - 1}; -1 is the last"
            )
        found.add(number % count)
    if not found:
        raise ConfigError(f"fields_by_stage[{field!r}]={given!r}: no stage reads it; leave it out with columns=")
    return frozenset(found)


CutOrder = Literal["head_tail", "contiguous"]
POSITIONS = "__positions__"


@dataclass(frozen=True)
class SequenceCut:
    """Each process of a context-parallel group gets its part of the sequences of its batches.

    Of n processes along the mesh's context dimension, process i gets of dimension 1 of each of ``fields``:

    - "head_tail": the pieces i and 2n - 1 - i of 2n equal ones, one behind the other. Under a causal mask, attention
      over such parts costs all processes the same: what early tokens save, late ones take. It is the order of Megatron
      (context parallelism), of Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2) and of
      torch's ``context_parallel``.
    - "contiguous": piece i of n, as full attention or a ring of its own may want it.

    Batches also get ``__positions__``, (B, length / n) int64: where each token is in its whole sequence. Position ids
    that are a field of their own, as those of packed documents, must be among the ``fields``.

    Args:
        fields: fields of batches, of shape (B, length, ...). All others stay whole.
        order: which part a process gets.
        mesh_dim: the mesh's context dimension; None takes the one called cp, context or context_parallel.

    Raises:
        ConfigError: no fields, or an unknown order.
    """

    fields: Sequence[str]
    order: CutOrder = "head_tail"
    mesh_dim: str | None = None

    def __post_init__(self) -> None:
        names = self.fields
        if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"SequenceCut(fields={names!r}): give a list of names of fields, such as ['tokens']")
        if self.order not in get_args(CutOrder):
            raise ConfigError(f"SequenceCut: {unknown_choice('order', self.order, get_args(CutOrder))}")

    def positions(self, length: int, part: int, parts: int) -> torch.Tensor:
        """(length / parts,) int64: the tokens of a sequence that part ``part`` of ``parts`` holds, in its order.

        Raises:
            ConfigError: the sequence has no such parts.
        """
        if not 0 <= part < parts:
            raise ConfigError(f"SequenceCut: part {part} of {parts} parts; they count from 0")
        return torch.cat([torch.arange(start, stop) for start, stop in self._ranges(length, part, parts)])

    def _ranges(self, length: int, part: int, parts: int) -> list[tuple[int, int]]:
        """The ranges of tokens of a part."""
        if parts == 1:
            return [(0, length)]
        pieces = parts if self.order == "contiguous" else 2 * parts
        if length % pieces:
            fitting = -(-length // pieces) * pieces
            raise ConfigError(
                f"{self} cuts sequences into {pieces} equal pieces for {parts} processes, which a length of {length} "
                f"does not allow: make it a multiple of {pieces}, such as {fitting}, in transform= or collate="
            )
        size = length // pieces
        chosen = [part] if self.order == "contiguous" else [part, pieces - 1 - part]
        return [(piece * size, (piece + 1) * size) for piece in chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCut:
    """A cut and which of its ``parts`` this process gets; ``absent`` are fields that this process does not read."""

    cut: SequenceCut
    part: int
    parts: int
    absent: frozenset[str] = frozenset()

    @staticmethod
    def read(cut: object, mesh: DeviceMesh | None, data_dims: Sequence[str] | None) -> PlacedCut | None:
        """The cut with this process's place in the mesh; None where no cut is given.

        Raises:
            ConfigError: it is no cut, or the mesh has no dimension for it.
        """
        if cut is None:
            return None
        if not isinstance(cut, SequenceCut):
            raise ConfigError(f"sequence_cut={cut!r}: must be a SequenceCut, such as SequenceCut(['tokens', 'labels'])")
        place = find_place_in_mesh(mesh, data_dims, argument="sequence_cut=", usual=CONTEXT_DIMS, named=cut.mesh_dim)
        return PlacedCut(cut=cut, part=place[0], parts=place[1])

    def check_fields(self, fields: Collection[str]) -> None:
        """Raise ConfigError if a field to cut is not among those of the data set, which batches have."""
        unknown = [name for name in self.cut.fields if name not in fields]
        if unknown:
            raise ConfigError(
                f"{self.cut} names {unknown}, which are not among the fields {sorted(fields)}"
                f"{did_you_mean(unknown, fields)}"
            )

    def __call__(self, batch: Any, num_rows: int) -> Any:
        """The batch with its sequences cut, and ``__positions__``. One without rows may lack fields and shapes.

        Raises:
            ConfigError: the batch is no dict, lacks a field, or has one without a dimension 1 that can be cut.
        """
        if not isinstance(batch, dict):
            raise ConfigError(f"{self.cut}: batches are {type(batch).__name__}; collate= must return a dict of tensors")
        names = [name for name in self.cut.fields if name in batch or (num_rows and name not in self.absent)]
        if not num_rows:
            names = [name for name in names if isinstance(batch[name], torch.Tensor) and batch[name].ndim > 1]
        lengths = {name: self._length(batch, name) for name in names}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"{self.cut}: the fields have different lengths: {lengths}; cut fields need the same")
        if not names:
            return batch
        length, rows = lengths[names[0]], len(batch[names[0]])
        ranges = self.cut._ranges(length, self.part, self.parts)
        taken = {name: torch.cat([batch[name][:, start:stop] for start, stop in ranges], dim=1) for name in names}
        positions = self.cut.positions(length, self.part, self.parts).repeat(rows, 1)
        return {**batch, **taken, POSITIONS: positions}

    def _length(self, batch: dict[str, Any], name: str) -> int:
        if name not in batch:
            raise ConfigError(f"{self.cut} names {name!r}, but batches have {sorted(batch)}")
        values = batch[name]
        if not isinstance(values, torch.Tensor):
            what = f"a {type(values).__name__}, as values of different shapes are"
            raise ConfigError(f"{self.cut}: field {name!r} is {what}; pad or pack it to one length before")
        if values.ndim < 2:
            raise ConfigError(f"{self.cut}: field {name!r} has the shape {tuple(values.shape)}, without a dimension 1")
        return int(values.shape[1])
