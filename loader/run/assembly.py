"""Where a loader stands and what assembles its batches, as its sources are: counted by arithmetic, or by reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..assembly.span_assembler import SpanAssembler
from ..config.loader_config import LoaderConfig
from ..config.mixture import Mixture
from ..metrics import Counters
from ..mixtures.position import MixturePosition
from ..mixtures.stream_assembler import MixedStreamAssembler
from ..mixtures.stream_position import MixedStreamPosition
from ..pipeline.assembler import Assembler, Equipment, Start
from ..positions.position import Position, RunPosition
from ..positions.stream_position import StreamPosition
from ..sources.kinds import Kind
from ..sources.quarantine import Quarantine
from ..sources.sources import Sources
from ..streams.assembler import StreamAssembler
from ..streams.channel import MemoryChannel, number_loader, open_channel
from ..streams.ledger import Ledgers
from ..streams.make_work import make_work


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What batches are made with: the sources, the decoders of each kind, and what replaces bad chunks.

    ``counts`` are of what is packed, by source. ``ledgers`` are what ranks tell each other of streams; None where there
    are none. ``is_logged``: an audit asks which samples were dropped.
    """

    sources: Sources
    kinds: Sequence[Kind]
    quarantine: Quarantine
    counts: Sequence[Counters]
    ledgers: Ledgers | None
    is_logged: bool

    def apart(self) -> Reading:
        """The same for whoever only looks: nothing is shared with a running pipeline, or told to other ranks."""
        sources = self.sources.apart()
        return Reading(
            sources=sources,
            kinds=[kind.copy() for kind in self.kinds],
            quarantine=self.quarantine.apart(sources),
            counts=[Counters() for _ in self.counts],
            ledgers=None if self.ledgers is None else Ledgers(MemoryChannel, rank=0, world_size=1),
            is_logged=False,
        )


def make_position(config: LoaderConfig, sources: Sources) -> RunPosition:
    """The beginning of a run over ``sources``, with the indexes of costs that its order and shares need.

    Raises:
        ConfigError, PartitionError, DatasetError: no order is as asked for, or an index is not there.
    """
    order = {name: getattr(config, name) for name in ("seed", "shuffle", "lanes", "window", "piece")}
    if isinstance(config.source, Mixture):
        if not sources.are_streams:
            return MixturePosition(config.source, sources, share=config.share, **order)
        of = [
            (source.manifest.fingerprint, None if s is None else s.to_dict())
            for source in sources
            for s in [source.selection]
        ]
        ledgers = _open_ledgers(f"mixture {of}", config)
        return MixedStreamPosition(config.source, sources, ledgers=ledgers, share=config.share, **order)
    [source] = sources
    manifest, selection, reshaping = source.manifest, source.selection, source.reshaping
    share, bucket_costs = config.costs.open(
        manifest, config.share, storage_options=config.storage_options, cache_dir=config.cache_dir
    )
    options = {
        **order,
        "share": share,
        "last_batch": config.last_batch,
        "selection": selection,
        "bucket": config.costs.bucket,
        "bucket_costs": bucket_costs,
    }
    if reshaping is None:
        return Position(manifest, **options)
    packing = reshaping.packing_for(manifest)
    return StreamPosition(
        manifest,
        ledgers=_open_ledgers(f"{manifest.fingerprint}/{selection and selection.to_dict()}", config),
        packing=None if packing is None else (packing[0].fingerprint, packing[1]),
        only_skips=reshaping.only_skips,
        **options,
    )


def _open_ledgers(identity: str, config: LoaderConfig) -> Ledgers:
    rank, world_size = config.share.rank, config.share.world_size
    channel = partial(open_channel, number_loader(identity, world_size), world_size)
    return Ledgers(channel, rank=rank, world_size=world_size)


def make_assembler(
    config: LoaderConfig, position: RunPosition, reading: Reading, equipment: Equipment, start: Start
) -> Assembler:
    """What assembles batches from ``start`` on, with the threads and buffers of a pipeline."""
    sources, kinds, quarantine = reading.sources, reading.kinds, reading.quarantine
    if not sources.are_streams:
        return SpanAssembler(
            equipment,
            start,
            position=position,
            sources=sources,
            kinds=kinds,
            last_batch=config.last_batch,
            quarantine=quarantine,
        )
    assert reading.ledgers is not None
    if isinstance(position, MixedStreamPosition):
        return MixedStreamAssembler(
            equipment,
            start,
            sources=sources,
            kinds=kinds,
            quarantine=quarantine,
            place=partial(position.place_at, start.epoch, start.position),
            open_ledger=partial(position.open_ledger, ledgers=reading.ledgers),
            is_logged=reading.is_logged,
            counts=reading.counts,
        )
    return StreamAssembler(
        equipment,
        start,
        last_batch=config.last_batch,
        selection=sources[0].selection,
        make_work=partial(make_work, sources[0], quarantine=quarantine),
        is_logged=reading.is_logged,
        ledgers=reading.ledgers,
    )
