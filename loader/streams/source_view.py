"""One source as streams see it: its view of the pipeline's equipment, its transform and the sizes of its portions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config.reshaping import fields_of_rows
from ..order.plan import next_power_of_two
from ..pipeline.tuning import mean_row_bytes
from ..sources.sources import OpenSource, Sources
from .epoch_supply import LaneOptions
from .packing import PackTransform
from .transforms import FilterTransform, LaneTransform

if TYPE_CHECKING:
    from ..columns import Block
    from ..pipeline.assembler import Equipment, ReadsChunks
    from ..reading.bad.chunks import ReplacesChunks
    from ..reading.bad.samples import BadSamples
    from ..sources.kinds import Kind

_ANCHOR_BYTES = 1 << 18  # about so much of a lane is worked on again at a resume
_MOST_SAMPLES = 1024  # of one round


class ReaderOfSource:
    """A reader of all sources' chunks, asked by the numbers that they have in one source."""

    def __init__(self, reader: ReadsChunks, first_chunk: int) -> None:
        self._reader = reader
        self._first = first_chunk

    @property
    def has_room(self) -> bool:
        return self._reader.has_room

    @property
    def needs_requests(self) -> bool:
        return self._reader.needs_requests

    @property
    def keeps_unused(self) -> bool:
        return self._reader.keeps_unused

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None:
        self._reader.request([self._first + chunk for chunk in chunks], at_once=at_once)

    def release(self, chunks: Sequence[int]) -> None:
        self._reader.release([self._first + chunk for chunk in chunks])

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]:
        for chunk, block in self._reader.take([self._first + chunk for chunk in chunks]):
            yield chunk - self._first, block


def equipment_of(
    equipment: Equipment, sources: Sources, kind: Kind, number: int, seed: int, bad: BadSamples | None
) -> Equipment:
    """Make the equipment for one source, where chunks and samples have its own numbers, and ``bad`` counts bad ones.

    Errors name a mixture's samples as those of the source, and its rows draw by the ``seed`` of its order.
    """
    if not sources.is_mixed:
        return replace(equipment, maker=replace(equipment.maker, bad=bad))
    chunks, maker = Sources([sources[number]], is_mixed=True).chunks, kind.maker(equipment.maker)
    options = replace(maker.options, avoided=sources[number].errors.avoided)
    maker = replace(maker, options=options, manifest=chunks.manifest, seed=seed, bad=bad)
    reader = ReaderOfSource(equipment.reader, sources.first_chunks[number])
    return replace(equipment, source=chunks, reader=reader, maker=maker)


def make_transform(source: OpenSource, equipment: Equipment, quarantine: ReplacesChunks) -> LaneTransform:
    """Make the transform for one source, whose numbers ``equipment`` and ``quarantine`` use; it may keep every row."""
    reshaping, manifest = source.reshaping, source.manifest
    fields = fields_of_rows(manifest, source.columns)
    if reshaping is None:
        return FilterTransform(equipment, quarantine=quarantine, sieve=None, fields=fields, may_drop=False)
    packing = reshaping.packing_for(manifest)
    if packing is not None and not reshaping.has_transform:  # documents are packed as they are read
        fields = source.columns
    read: dict[str, Any] = {"quarantine": quarantine, "sieve": reshaping.sieve, "fields": fields}
    if packing is None:
        return FilterTransform(equipment, may_drop=reshaping.may_drop, skips=reshaping.skips, **read)
    packer, unit = packing
    return PackTransform(equipment, packer=packer, unit=unit, **read)


def choose_lane_options(transform: LaneTransform, equipment: Equipment, sources: int, *, patience: int) -> LaneOptions:
    """Choose the portions in which one of so many sources finds its outputs; they share the memory."""
    row_bytes = mean_row_bytes(equipment.source.manifest)
    round_rows = max(64, equipment.options.span_bytes // sources // row_bytes)
    if transform.gives_samples:  # which take memory until they are due: enough at once to keep all threads busy
        round_rows = min(_MOST_SAMPLES, max(64, round_rows // 4))
    return LaneOptions(
        spacing=anchor_spacing(row_bytes) if transform.is_per_input else transform.unit,
        round_rows=round_rows,
        room_bytes=equipment.options.batch_budget_bytes // sources,
        patience=patience,
    )


def anchor_spacing(row_bytes: int) -> int:
    """Choose how many inputs lie between anchors of a lane: the same on every rank, by the data set alone."""
    return min(1024, max(16, next_power_of_two(_ANCHOR_BYTES // row_bytes)))
