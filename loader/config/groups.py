"""The loader's arguments about groups of processes that get the same samples, but not all of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..dataset.manifest import Manifest
from ..decoding.batch_options import BatchOptions
from ..errors import ConfigError
from ..ranks.sequence_cut import PlacedCut, SequenceCut
from ..ranks.stages import FieldsByStage, StageFields
from .checks import fields_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class GroupArguments:
    """What this process reads, by its stage of a pipeline, and its part of sequences; None where all and whole.

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

    def open(
        self, manifest: Manifest, columns: list[str] | None, options: BatchOptions
    ) -> tuple[list[str] | None, BatchOptions]:
        """The columns that this process reads, perhaps none, None for all; and the options of its batches.

        Raises:
            ConfigError: a field is not in the data set, or not read, where no function of the user's makes fields.
        """
        read = columns if self.stages is None else self.stages.choose(manifest.fields, columns)
        if self.cut is None:
            return read, options
        known = fields_of(manifest) if columns is None else columns
        if options.transform is None and options.collate is None:
            self.cut.check_fields(known)
        absent = frozenset() if read is None else frozenset(known).difference(read)
        return read, replace(options, finish=replace(self.cut, absent=absent))
