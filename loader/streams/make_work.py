"""Makes the work on a source's rows: what keeps or packs them, as the source says."""

from __future__ import annotations

from typing import Any

from ..config.reshaping import fields_of_rows
from ..pipeline.assembler import Equipment
from ..reading.bad.quarantine import ReplacesChunks
from ..sources.sources import OpenSource
from .pack_work import PackWork
from .work import FilterWork, WindowWork


def make_work(source: OpenSource, equipment: Equipment, quarantine: ReplacesChunks) -> WindowWork:
    """The work on rows of one source, whose numbers ``equipment`` and ``quarantine`` use; all stay if it drops none."""
    reshaping, manifest = source.reshaping, source.manifest
    fields = fields_of_rows(manifest, source.columns)
    if reshaping is None:
        return FilterWork(equipment, quarantine=quarantine, sieve=None, fields=fields, may_drop=False)
    packing = reshaping.packing_for(manifest)
    if packing is not None and not reshaping.has_transform:  # documents are packed as they are read
        fields = source.columns
    read: dict[str, Any] = {"quarantine": quarantine, "sieve": reshaping.sieve, "fields": fields}
    if packing is None:
        return FilterWork(equipment, may_drop=reshaping.may_drop, skips=reshaping.skips, **read)
    packer, unit = packing
    return PackWork(equipment, packer=packer, unit=unit, **read)
