"""Opens the data sets of a loader, one after another: the same way for one as for the sources of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...storage import open_store
from ...storage.store import is_encrypted
from ..config.checks import check_names, fields_of, make_selection
from ..config.mixture import naming_source
from ..dataset.class_names import LABEL_FIELD, join_class_names, warn_of_numbers
from ..dataset.index import find_manifest
from ..errors import ConfigError
from ..formats.detect import make_format
from ..formats.schema import marked_shape
from ..reading.chunk_source import ChunkSource
from ..reading.layouts import KeptLayouts
from .sources import OpenSource, Sources

if TYPE_CHECKING:
    from ..config.loader_config import AskedSource, LoaderConfig
    from ..config.reshaping import Reshaping
    from ..counters import Counters

_MIXED_ADVICE = "pack one anew with classes= (--classes) and the other's URL, or give them numbers by a transform="


def open_sources(config: LoaderConfig, counters: Counters) -> Sources:
    """Find, index and open each data set, and compare what they hold.

    Raises:
        ConfigError, PartitionError, DatasetError, FormatError, StorageError: with a note of a mixture's source.
    """
    from .fields import compare_names

    opened: list[OpenSource] = []
    try:
        for asked, reshaping in zip(config.sources, config.reshapings, strict=True):
            with naming_source(asked.name):
                opened.append(_open(asked, reshaping, config, counters))
        if config.is_mixture:
            _mark_alike(opened)
            warn_of_classes(opened)
            compare_names(opened)
            check_packed(opened)
            config.errors.check_avoided([source.errors for source in opened])
        return Sources(opened, is_mixed=config.is_mixture)
    except BaseException:
        for source in opened:
            source.store.close()
        raise


def _open(asked: AskedSource, reshaping: Reshaping | None, config: LoaderConfig, counters: Counters) -> OpenSource:
    given = asked.given
    with ExitStack() as undo:
        with ExitStack() as lingering:  # until the data's store has taken over their connections
            manifest = find_manifest(
                given.url,
                lingering,
                split=given.split,
                storage_options=given.storage_options,
                format=given.format,
                cache_dir=config.cache_dir,
            )
            store = open_store(
                manifest.url,
                storage_options=given.storage_options,
                cache_dir=config.cache_dir,
                cache_limit=config.cache_bytes,
            )
            undo.callback(store.close)
        if config.is_mixture:  # errors of fields come before errors of samples
            check_names(manifest, given.columns, given.decode)
        selection = make_selection(manifest, asked.subset, asked.weights)
        errors = config.errors.open(manifest, config.share, selection, asked.name or None)
        names = check_names(manifest, given.columns, given.decode)
        columns = read = config.group.choose_columns(manifest, names)
        if reshaping is not None:
            columns = reshaping.columns_of_batches(manifest, columns)
            read = reshaping.columns_to_read(manifest, columns)
        chunks = ChunkSource(
            manifest,
            make_format(manifest.format, manifest.config),
            store,
            read,
            counters,
            config.tuning.memory_bytes,
            errors.avoided_chunks,
            maps_files=config.maps_files,
            # Nothing that was encrypted goes onto a disk, and these hold keys and small values.
            kept=None if is_encrypted(store) else KeptLayouts(manifest, read, config.cache_dir),
        )
        undo.pop_all()
    return OpenSource(
        name=asked.name or manifest.url,
        options=given,
        manifest=manifest,
        selection=selection,
        fields=fields_of(manifest) if names is None else names,
        columns=columns,
        store=store,
        chunks=chunks,
        reshaping=reshaping,
        errors=errors,
    )


def _mark_alike(sources: Sequence[OpenSource]) -> None:
    """Have all sources mark a column's nulls, whatever their formats, if one delivers marks, as within shards."""
    marked = {
        name: shape
        for source in sources
        if source.options.transform is None and source.packer is None
        for name, column in _columns(source).items()
        if (shape := marked_shape(column)) is not None and (source.columns is None or name in source.columns)
    }
    for source in sources:
        source.chunks.mark_nulls({name: shape for name, shape in marked.items() if name in source.manifest.fields})


def _columns(source: OpenSource) -> Mapping[str, Any]:
    columns: Mapping[str, Any] = source.manifest.schema.get("columns", {})
    return columns


def warn_of_classes(sources: Sequence[OpenSource]) -> None:
    """Warn where two sources whose labels are delivered number classes differently."""
    labelled = [
        source
        for source in sources
        if LABEL_FIELD in source.manifest.fields and (source.columns is None or LABEL_FIELD in source.columns)
    ]
    _, problem = join_class_names({repr(source.name): source.manifest.classes for source in labelled})
    if problem is not None:
        warn_of_numbers(f"the sources of the mixture number classes differently: {problem}", _MIXED_ADVICE)


def check_packed(sources: Sequence[OpenSource]) -> None:
    """Raise ConfigError unless all sources give sequences of one length with the same fields, or none does."""
    packs = {source.name: None if source.packer is None else source.packer.packing.seq_len for source in sources}
    if len(set(packs.values())) > 1:
        said = ", ".join(
            f"{name!r} {'does not pack' if length is None else f'makes {length}'}" for name, length in packs.items()
        )
        raise ConfigError(
            f"the sources of the mixture differ in the tokens of their sequences: {said}; give all the same seq_len, "
            "or the loader packing= for all. Packing(seq_len=..., buffer_size=1) makes a sequence of each sample"
        )
    made = {source.name: source.packer.packing.batch_fields for source in sources if source.packer is not None}
    if len(set(made.values())) > 1:
        said = ", ".join(f"{name!r} {list(fields)}" for name, fields in made.items())
        raise ConfigError(
            f"the sources of the mixture differ in the fields of their packed batches: {said}; give all their Packing "
            "the same fields="
        )
