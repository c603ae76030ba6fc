"""What a loader of a mixture is made of, where a loader of one data set has its manifest, order and assembler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..decoding.batch_options import BatchOptions
from ..decoding.decode import RawValues
from ..errors import ConfigError
from ..metrics import Counters, LoaderMetrics, MixtureMetrics, SourceProgress
from ..order.mixtures.spans import SourceOrder
from ..order.plan import Share
from ..ranks import channel as channels
from ..ranks.channel import number_loader
from ..ranks.ledger import Ledgers
from ..sources.kinds import Kind, group_kinds, group_layouts, make_kind
from ..sources.mixture import Mixture
from ..sources.sources import Sources, open_sources
from .fields import check_names
from .position import MixturePosition
from .quarantine import MixedQuarantine
from .stream_position import MixedStreamPosition

# Arguments of a loader that a mixture cannot have as a whole, and what to do instead.
_OF_SOURCES = {
    "subset": "give each source its own: Source(url, subset=...)",
    "split": "give each source its own: Source(url, split=...)",
    "weights": "the weights of sources are in the Mixture; weights of single samples are for a loader of one data set",
    "on_error": "bad samples of a mixture are neither replaced nor skipped yet; max_bad_chunks= replaces its chunks",
    "cost": "costs are indexed for one data set; global batches of a mixture are cut by the number of samples",
    "bucket": "costs are indexed for one data set; the order of a mixture's sources is not bucketed",
    "fields_by_stage": "not offered yet; give the loaders of each stage their own columns=",
    "batch_tokens": "the weights of a mixture count samples; give batch_size= or global_batch_size=",
}


def refuse_whole(**arguments: Any) -> None:
    """Raise ConfigError for arguments that only a loader of one data set has."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name}= with a Mixture: {_OF_SOURCES[name]}")


@dataclass(frozen=True, kw_only=True)
class MixtureParts:
    """The opened sources of a mixture, the position in its run, and what reads and assembles them."""

    sources: Sources
    position: MixturePosition
    kinds: Sequence[Kind]
    quarantine: MixedQuarantine
    counts: Sequence[Counters]  # of what is packed, by source
    is_logged: bool

    @property
    def orders(self) -> Sequence[SourceOrder]:
        return self.position.orders

    def batch_options(self, options: BatchOptions) -> BatchOptions:
        """The loader's, with what a mixture adds: of several kinds, each has its own transform."""
        options = replace(options, may_drop=False)
        transform = self.kinds[0].transform if len(self.kinds) == 1 else None
        return replace(options, transform=transform, identify=self.sources.identify)

    def add_progress(self, metrics: LoaderMetrics) -> MixtureMetrics:
        """A loader's metrics with those of its sources."""
        _, _, here = self.position.cursor()
        progress = {}
        for number, (source, taken) in enumerate(zip(self.sources, here.taken, strict=True)):
            length = None if source.packer is not None else source.manifest.config.get("seq_len")
            packed = self.counts[number].totals()
            progress[source.name] = SourceProgress(
                samples=taken,
                epochs=self.position.count_epochs(number, taken),
                tokens=None if length is None else taken * int(length),
                packed_documents=packed.packed_documents,
                packed_tokens=packed.packed_tokens,
                padding_tokens=packed.padding_tokens,
            )
        return MixtureMetrics(**vars(metrics), run_samples=here.position, sources=progress)


def open_mixture(
    mixture: Mixture,
    *,
    opening: Mapping[str, Any],
    ordering: Mapping[str, Any],
    raw: RawValues,
    processes: int,
    max_bad_chunks: int,
    is_logged: bool,
) -> MixtureParts:
    """Open all sources and compare what they hold; ``opening`` and ``ordering`` are the arguments of these steps.

    Raises:
        ConfigError, PartitionError, DatasetError, FormatError, StorageError: as a loader of one data set.
    """
    sources = open_sources(mixture, **opening)
    try:
        check_names(sources)
        check_packed(sources)
        position = _make_position(mixture, sources, **ordering)
        groups = group_kinds(sources)
        if processes and len(groups) > 1:
            one, other = (sources[group[0]].name for group in groups[:2])
            raise ConfigError(
                f"processes={processes} with sources that have transform= or decode= of their own ({one!r} and "
                f"{other!r}): worker processes run one; use threads (processes=0), or one transform for all sources"
            )
        groups = [(number,) for number in range(len(sources))] if sources.are_streams else group_layouts(sources)
        return MixtureParts(
            sources=sources,
            position=position,
            kinds=[make_kind(sources, group, raw, processes) for group in groups],
            quarantine=MixedQuarantine(sources, [source.chunks for source in sources], max_bad_chunks),
            counts=[Counters() for _ in sources],
            is_logged=is_logged,
        )
    except BaseException:
        sources.close()
        raise


def _make_position(mixture: Mixture, sources: Sources, *, share: Share, **ordering: Any) -> MixturePosition:
    if not sources.are_streams:
        return MixturePosition(mixture, sources, share=share, **ordering)
    of = [
        (source.manifest.fingerprint, None if s is None else s.to_dict())
        for source in sources
        for s in [source.selection]
    ]
    name = number_loader(f"mixture {of}", share.world_size)
    ledgers = Ledgers(
        lambda: channels.open_channel(name, share.world_size), rank=share.rank, world_size=share.world_size
    )
    return MixedStreamPosition(mixture, sources, ledgers=ledgers, share=share, **ordering)


def check_packed(sources: Sources) -> None:
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
