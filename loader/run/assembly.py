"""The sampler and assembler of a loader's sources: steps are counted by arithmetic, or by reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.mixture import Mixture
from ..counters import Counters
from ..sampler.dataset import DatasetSchedule
from ..sampler.sampler import Sampler

if TYPE_CHECKING:
    from ..config.loader_config import LoaderConfig
    from ..order.costs.costs import Cost, SampleCosts
    from ..pipeline.assembler import Assembler, Equipment, Start
    from ..pipeline.beside.requests import Known
    from ..ranks.ledger import Ledgers
    from ..reading.bad.chunks import BadChunk
    from ..reading.bad.samples import BadNews, BadSamples
    from ..sources.kinds import Kind
    from ..sources.quarantine import Quarantine
    from ..sources.sources import Sources


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The parts that batches are made with: the sources, the decoders of each kind, and the replacer of bad chunks.

    ``counts`` are of what is packed, by source. ``ledgers`` share the ranks' progress in streams; None where there
    are none. ``is_logged``: an audit asks which samples were dropped. ``bad`` counts the bad samples of each source;
    None where the first one ends the run, and in a preview.
    """

    sources: Sources
    kinds: Sequence[Kind]
    quarantine: Quarantine
    counts: Sequence[Counters]
    ledgers: Ledgers | None
    is_logged: bool
    bad: Sequence[BadSamples | None]

    def export(self) -> Known:
        """Describe what another process needs to know before it reads. Raises as ``locate_channel`` does."""
        from ..pipeline.beside.requests import Known

        return Known(
            bad=[bad.export() for bad in self.bad if bad is not None],
            bad_chunks=self.quarantine.records,
            channel=None if self.ledgers is None else self.ledgers.locate_channel(),
        )

    def learn(self, known: Known) -> None:
        """Take over what ``export`` described in another process."""
        self.absorb(known.bad, known.bad_chunks)
        if self.ledgers is not None and known.channel is not None:
            self.ledgers.connect(known.channel)

    def absorb(self, bad: Sequence[BadNews], bad_chunks: Sequence[BadChunk]) -> None:
        """Take over what another process has found to be bad."""
        for known, news in zip([known for known in self.bad if known is not None], bad, strict=True):
            known.absorb(news)
        self.quarantine.absorb(bad_chunks)

    def apart(self) -> Reading:
        """Make a copy for a preview, which shares nothing with a running pipeline and posts nothing to other ranks."""
        sources, ledgers = self.sources.apart(), None
        if self.ledgers is not None:
            from ..ranks.channel import MemoryChannel
            from ..ranks.ledger import Ledgers

            ledgers = Ledgers(MemoryChannel, rank=0, world_size=1)
        return Reading(
            sources=sources,
            kinds=[kind.copy() for kind in self.kinds],
            quarantine=self.quarantine.apart(sources),
            counts=[Counters() for _ in self.counts],
            ledgers=ledgers,
            is_logged=False,
            bad=[None for _ in sources],
        )


def make_sampler(config: LoaderConfig, sources: Sources) -> Sampler:
    """Make the sampler at the beginning of a run, with the indexes of costs that its order and shares need.

    Raises:
        ConfigError, PartitionError, DatasetError: no order is as asked for, or an index is not there.
    """
    order = {name: getattr(config, name) for name in ("seed", "shuffle", "lanes", "window", "piece")}
    of = [(s.manifest.fingerprint, None if s.selection is None else s.selection.to_dict()) for s in sources]
    opened = partial(_open_index, config, sources)
    share = config.costs.add_to(config.share, opened)
    bucket: dict[str, Any] = {"bucket": config.costs.bucket, "bucket_costs": config.costs.open_bucket(opened)}
    if isinstance(config.source, Mixture):
        from ..sampler.mixture import MixtureSchedule

        ledgers = _open_ledgers(f"mixture {of}", config) if sources.has_streams else None
        return Sampler(MixtureSchedule(config.source, sources, share=share, ledgers=ledgers, **order, **bucket))
    [source], [(fingerprint, selected)] = sources, of
    schedule = DatasetSchedule(
        source.manifest,
        **order,
        share=share,
        last_batch=config.last_batch,
        selection=source.selection,
        **bucket,
        ledgers=_open_ledgers(f"{fingerprint}/{selected}", config) if sources.has_streams else None,
        stream_kind=source.stream_kind,
        only_skips=source.drops_only_bad,
    )
    return Sampler(schedule)


def _open_index(config: LoaderConfig, sources: Sources, cost: Cost) -> Sequence[SampleCosts]:
    """Read the index of costs of each source."""
    from ..dataset.cost_index import open_costs

    found = []
    for number, source in enumerate(sources):
        with sources.naming(number):
            options = source.options.storage_options
            found.append(open_costs(source.manifest, cost, storage_options=options, cache_dir=config.cache_dir))
    return found


def _open_ledgers(identity: str, config: LoaderConfig) -> Ledgers:
    from ..ranks.channel import locate_channel, number_loader, open_channel
    from ..ranks.ledger import Ledgers

    rank, world_size = config.share.rank, config.share.world_size
    name = number_loader(identity, world_size)
    return Ledgers(
        partial(open_channel, name, world_size),
        rank=rank,
        world_size=world_size,
        locate=partial(locate_channel, name, world_size),
    )


def make_assembler(
    config: LoaderConfig, sampler: Sampler, reading: Reading, equipment: Equipment, start: Start
) -> Assembler:
    """Make the assembler of batches from ``start`` on, with the threads and buffers of a pipeline."""
    sources, kinds, quarantine = reading.sources, reading.kinds, reading.quarantine
    if not sources.has_streams:
        from ..assembly.span_assembler import SpanAssembler

        return SpanAssembler(
            equipment,
            start,
            sampler=sampler,
            sources=sources,
            kinds=kinds,
            last_batch=config.last_batch,
            quarantine=quarantine,
        )
    from ..sampler.mixture import MixtureSchedule
    from ..streams.assembler import assemble_mixture, assemble_one

    assert reading.ledgers is not None
    of_all: dict[str, Any] = {
        "sources": sources,
        "kinds": kinds,
        "quarantine": quarantine,
        "is_logged": reading.is_logged,
        "bad": reading.bad,
    }
    if isinstance(schedule := sampler.schedule, MixtureSchedule):
        return assemble_mixture(
            equipment,
            start.share,
            place=schedule.stream_place(start.epoch, start.position),
            open_ledger=partial(schedule.open_ledger, ledgers=reading.ledgers),
            counts=reading.counts,
            **of_all,
        )
    return assemble_one(equipment, start, ledgers=reading.ledgers, last_batch=config.last_batch, **of_all)
