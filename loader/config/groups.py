"""The loader's arguments about groups of processes that get the same samples, but not all of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..ranks.model_parallel import FieldsByStage, PlacedCut, SequenceCut, StageFields

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..dataset.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class GroupArguments:
    """This process's columns, by its pipeline stage, and its part of sequences; None where all and whole.

    Raises:
        ConfigError: a value, or a combination with the other arguments, cannot work; says what would.
    """

    stages: StageFields | None
    cut: PlacedCut | None

    @staticmethod
    def read(
        fields_by_stage: FieldsByStage | None,
        sequence_cut: SequenceCut | None,
        mesh: DeviceMesh | None,
        data_dims: Sequence[str] | None,
        *,
        max_bad_chunks: int,
        may_drop: bool,
        keeps_by_all: bool,
        packs: bool,
        has_collate: bool,
    ) -> GroupArguments:
        if packs and fields_by_stage is not None:
            raise ConfigError(
                "fields_by_stage= with packing=: all stages pack the same documents, and so read them; leave out "
                "fields_by_stage=, and use on each stage what it needs of the batches"
            )
        if packs and sequence_cut is not None and not has_collate:
            raise ConfigError(
                "sequence_cut= with packing= and no collate=: labels must be shifted before sequences are cut, and "
                "cu_seqlens fit whole ones alone; make tensors of the sequences and their labels in collate="
            )
        stages = StageFields.read(
            fields_by_stage,
            mesh,
            data_dims,
            max_bad_chunks=max_bad_chunks,
            may_drop=may_drop,
            keeps_by_all=keeps_by_all,
        )
        return GroupArguments(stages=stages, cut=PlacedCut.read(sequence_cut, mesh, data_dims))

    def choose_columns(self, manifest: Manifest, names: list[str] | None) -> list[str] | None:
        """Choose the columns of ``names`` that this process reads, perhaps none; None for all.

        Raises:
            ConfigError: a field that stages read is not in the data set.
        """
        return names if self.stages is None else self.stages.choose(manifest.fields, names)

    def cut_batches(self, fields: Sequence[str], read: Sequence[str] | None, *, are_made: bool) -> PlacedCut | None:
        """Cut sequences in batches of ``fields``, of which ``read`` are read here, None for all.

        ``are_made``: a user's function makes the fields of batches.

        Raises:
            ConfigError: a field that is cut is not among them.
        """
        if self.cut is None:
            return None
        if not are_made:
            self.cut.check_fields(fields)
        absent = frozenset() if read is None else frozenset(fields).difference(read)
        return replace(self.cut, absent=absent | self.cut.absent)
