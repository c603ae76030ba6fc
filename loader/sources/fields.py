"""The check that all sources give samples of the same fields: before the first batch, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..columns import KEY_COLUMN, Block, IntArray
from ..config.checks import fields_of
from ..config.reshaping import fields_of_rows
from ..decoding.gather import gather
from ..errors import ConfigError, LoaderClosedError, MemoryLimitError
from ..order.spans import ChunkRows
from ..reading.bad.chunks import DATA_ERRORS
from .kinds import Kind, group_kinds

if TYPE_CHECKING:
    from ..decoding.batch import BatchMaker
    from .sources import OpenSource, Sources

_MOST_LOOKED_AT, _MOST_TRIED = 256, 16  # samples that may all be dropped
_MOST_CHUNKS = 4  # that may all be bad
_CURE = (
    "give the sources the same fields with Source(columns=...), or the same fields and types with Source(transform=...)"
)


def compare_names(sources: Sequence[OpenSource]) -> None:
    """Compare the fields of the sources without a transform, before anything is read.

    Raises:
        ConfigError: names a field that one has and another lacks.
    """
    plain = [source for source in sources if source.options.transform is None and source.packer is None]
    for source in plain[1:]:
        _compare(plain[0].name, _names(plain[0]), source.name, _names(source))


def _names(source: OpenSource) -> dict[str, Any]:
    names = source.columns
    if names is None:
        names = fields_of(source.manifest)
    types = source.manifest.schema.get("columns", {})
    return {name: str(types[name]["type"]) if name in types else None for name in names}


def _compare(one: str, fields: dict[str, Any], other: str, others: dict[str, Any]) -> None:
    for (has, own), (lacks, missing) in (((one, fields), (other, others)), ((other, others), (one, fields))):
        extra = [name for name in own if name not in missing]
        if extra:
            raise ConfigError(
                f"the sources of the mixture differ: {has!r} has the field {extra[0]!r}, and {lacks!r} does not (it "
                f"has {sorted(missing)}); {_CURE}"
            )


def check_fields(sources: Sources, kinds: Sequence[Kind], maker: BatchMaker) -> None:
    """Compare a first sample of each source as batches have it, unless their formats promise the same.

    Reads one chunk of each source, once. Called by the assembler's thread, before the first batch.

    Raises:
        ConfigError: names a field that differs, and the sources.
        The errors of reading, decoding or transforming the samples.
    """
    if sources.are_alike or (len(group_kinds(sources)) == 1 and len({_promise(source) for source in sources}) == 1):
        return
    found = [
        (sources[number].name, _first_fields(sources, number, kind, maker))
        for kind in kinds
        for number in kind.sources
        if sources[number].packer is None  # whose sequences all have the same fields
    ]
    seen = [(name, fields) for name, fields in found if fields is not None]
    for name, fields in seen[1:]:
        one, of_one = seen[0]
        _compare(one, of_one, name, fields)
        for field, what in fields.items():
            if what.differs(of_one[field]):
                raise ConfigError(
                    f"the sources of the mixture differ: the field {field!r} is {of_one[field]} in {one!r} and {what} "
                    f"in {name!r}; {_CURE}"
                )
    sources.are_alike = True


@dataclass(frozen=True, slots=True)
class _Value:
    """A field's value in a batch: the dtype of a tensor, with its shape where every sample has that, or a type.

    None: unknown, since the first sample lacks it, or since samples may differ.
    """

    kind: str | None
    shape: tuple[int, ...] | None = None

    def differs(self, other: _Value) -> bool:
        kinds, shapes = (self.kind, other.kind), (self.shape, other.shape)
        return (None not in kinds and kinds[0] != kinds[1]) or (None not in shapes and shapes[0] != shapes[1])

    def __str__(self) -> str:
        return f"{self.kind}" if self.shape is None else f"{self.kind} of shape {self.shape}"


def _promise(source: OpenSource) -> Any:
    types = tuple(sorted(_names(source).items()))
    # Of untyped fields only the names are known, and images are recognised by their extension.
    return source.manifest.format, types, tuple(sorted(map(str, source.manifest.config.items())))


def _first_fields(sources: Sources, number: int, kind: Kind, maker: BatchMaker) -> dict[str, _Value] | None:
    """Read the fields and their values of a source's first sample that stays; None if none of the first few does."""
    source = sources[number]
    goes_on = source.errors.arguments.goes_on
    found_first = _first_readable(source, goes_on=goes_on)
    if found_first is None:
        return None
    chunk, block = found_first
    numbers = np.arange(source.chunk_samples[chunk]) if source.selection is None else source.selection.rows_of(chunk)
    joint = chunk + sources.first_chunks[number]
    own = kind.maker(maker)
    plain: dict[str, Any] = {"collate": None, "with_ids": False, "pad": False, "finish": None, "goes_on": False}
    own = replace(own, options=replace(own.options, **plain))  # a bad sample shows nothing, and counts in its place
    read = fields_of_rows(source.manifest, source.columns)
    for row in _kept(source, block, numbers[:_MOST_LOOKED_AT])[:_MOST_TRIED].tolist():
        group = ChunkRows(joint, np.array([row]), np.zeros(1, np.int64))
        rows = gather([(group, block)], 1, sources.manifest.first_ids, kind.decoders)
        if read is not None:
            rows = replace(rows, fields={name: of for name, of in rows.fields.items() if name in read})
        keys = np.zeros((1, 3), np.uint64)
        if kind.may_drop:
            samples, failed = own.work(rows, 0, keys).samples()
            if failed is not None or samples[0] is None:  # its error is raised again in its place
                continue
            batch = own.join([samples[0]], rows.ids, 1, 1).result()
        else:
            try:
                batch = own.start(rows, 0, 1, 1, keys).result()
            except (LoaderClosedError, ConfigError, MemoryLimitError, MemoryError):
                raise
            except Exception:
                if goes_on:
                    continue
                raise
        found = {}
        if source.columns is not None and KEY_COLUMN not in source.columns:
            batch.pop(KEY_COLUMN, None)  # which comes whatever is chosen, and not of all formats
        for name, values in batch.items():
            column = block.columns.get(name)
            is_fixed = isinstance(values, torch.Tensor) and kind.transform is None and not hasattr(column, "starts")
            found[name] = _describe(values, is_fixed=is_fixed)
        return found
    return None


def _first_readable(source: OpenSource, *, goes_on: bool) -> tuple[int, Block] | None:
    """Find the first chunk with readable samples; a few bad ones are skipped.

    None after these, where the run ``goes_on`` after bad samples; else the error of the last one is raised.
    """
    chunks = np.flatnonzero(source.chunk_samples)[:_MOST_CHUNKS].tolist()
    for chunk in chunks:
        try:
            return chunk, source.chunks.load(chunk)
        except DATA_ERRORS:
            if chunk == chunks[-1] and not goes_on:
                raise
    return None


def _kept(source: OpenSource, block: Block, rows: IntArray) -> IntArray:
    """Select those of a chunk's rows that ``keep=`` keeps."""
    sieve = None if source.reshaping is None else source.reshaping.sieve
    if sieve is None:
        return rows
    group = ChunkRows(0, rows, np.arange(len(rows)))
    looked = gather([(group, block)], len(rows), np.zeros(1, np.int64), sieve.decoders)
    asked = sieve.fields(source.manifest.fields)
    if asked is not None:
        looked = replace(looked, fields={name: of for name, of in looked.fields.items() if name in asked})
    try:
        kept: IntArray = rows[sieve.holds(looked)]
    except Exception:  # noqa: BLE001 - raised again, with the sample's name, where its batch would have been
        return rows[:0]
    return kept


def _describe(values: Any, *, is_fixed: bool) -> _Value:
    if isinstance(values, torch.Tensor):
        return _Value(str(values.dtype), tuple(values.shape[1:]) if is_fixed else None)
    return _Value(None if values[0] is None else f"{type(values[0]).__name__} values")
