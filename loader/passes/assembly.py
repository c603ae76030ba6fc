"""What delivers a loader's batches: the plain assembler, or one of lanes that yield what is kept of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..decoding.decode import FieldDecoders
from ..errors import ConfigError
from ..metrics import Counters
from ..mixtures.assembler import MixtureAssembler
from ..mixtures.parts import MixtureParts
from ..mixtures.stream_position import MixedStreamPosition
from ..order.costs.costs import SampleCosts
from ..order.plan import Share
from ..pipeline.assembler import Assembler, Equipment, Start
from ..pipeline.pipeline import Pipeline
from ..pipeline.plain import PlainAssembler
from ..positions.position import Position
from ..positions.stream_position import StreamPosition
from ..ranks.channel import MemoryChannel, number_loader, open_channel
from ..ranks.ledger import Ledgers
from ..reading.bad.quarantine import Quarantine
from ..sources.kinds import Kind
from ..sources.sources import Sources
from ..streams.assembler import assemble_mixture, assemble_one
from .passes import Passes

MakeAssembler = Callable[[Equipment, Start], Assembler]


def make_position(sources: Sources, *, share: Share, **options: Any) -> Position:
    """Where a loader of one data set begins; ``options`` are those of ``Position``."""
    [source] = sources
    manifest, selection, reshaping = source.manifest, source.selection, source.reshaping
    options["selection"] = selection
    if reshaping is None:
        return Position(manifest, share=share, **options)
    identity = f"{manifest.fingerprint}/{selection and selection.to_dict()}"
    channel = partial(open_channel, number_loader(identity, share.world_size), share.world_size)
    ledgers = Ledgers(channel, rank=share.rank, world_size=share.world_size)
    packing = reshaping.packing_for(manifest)
    packed = None if packing is None else (packing[0].fingerprint, packing[1])
    only_skips = reshaping.only_skips
    return StreamPosition(manifest, ledgers=ledgers, packing=packed, only_skips=only_skips, share=share, **options)


def make_assembler(
    sources: Sources,
    kinds: Sequence[Kind],
    position: Position,
    *,
    last_batch: str,
    quarantine: Quarantine,
    bucket_costs: SampleCosts | None,
    is_logged: bool,
) -> MakeAssembler:
    """How pipelines of a loader of one data set, of one kind, get their assembler."""
    [source] = sources
    if source.reshaping is None:
        return partial(
            PlainAssembler,
            last_batch=last_batch,
            quarantine=quarantine,
            selection=source.selection,
            bucket_costs=bucket_costs,
        )
    assert isinstance(position, StreamPosition)
    return partial(
        assemble_one,
        sources=sources,
        kinds=kinds,
        quarantine=quarantine,
        ledgers=position.ledgers,
        last_batch=last_batch,
        is_logged=is_logged,
    )


def make_mixed_assembler(parts: MixtureParts) -> MakeAssembler:
    """How pipelines of a loader of a mixture get their assembler."""
    position = parts.position
    of_all: dict[str, Any] = {"sources": parts.sources, "kinds": parts.kinds, "quarantine": parts.quarantine}
    of_all["place"] = position.place
    if not isinstance(position, MixedStreamPosition):
        return partial(MixtureAssembler, **of_all)
    return partial(
        assemble_mixture, open_ledger=position.open_ledger, is_logged=parts.is_logged, counts=parts.counts, **of_all
    )


def peek_alone(make_pipeline: partial[Pipeline], decoders: FieldDecoders, passes: Passes) -> Any:
    """The first batch of a pass that would begin now, by a pipeline of its own beside the running one.

    Raises:
        ConfigError: there are several ranks, which would have to look at the same time.
    """
    return _peek(make_pipeline, decoders, passes, ledgers=Ledgers(MemoryChannel, rank=0, world_size=1))


def peek_mixed(make_pipeline: partial[Pipeline], parts: MixtureParts, passes: Passes) -> Any:
    """As ``peek_alone``, of a mixture of which sources drop or pack samples."""
    position = parts.position
    assert isinstance(position, MixedStreamPosition)
    return _peek(
        make_pipeline,
        parts.kinds[0].decoders,
        passes,
        kinds=[replace(kind, decoders=kind.decoders.copy()) for kind in parts.kinds],
        place=lambda: position.place_at(*position.pass_start),
        open_ledger=partial(position.open_ledger, ledgers=Ledgers(MemoryChannel, rank=0, world_size=1)),
        counts=[Counters() for _ in parts.counts],
    )


def _peek(make_pipeline: partial[Pipeline], decoders: FieldDecoders, passes: Passes, **alone: Any) -> Any:
    passes.resources.check_open()
    passes.check_rank()
    if passes.share.world_size > 1:
        raise ConfigError(
            f"peek() of a loader that drops or packs samples, with world_size={passes.share.world_size}: what is "
            "left is known to all ranks together; look with a loader of rank=0, world_size=1"
        )
    make = make_pipeline.keywords["make_assembler"]
    pipeline = make_pipeline(
        options=passes.tune(passes.position.order),
        start=passes.start(*passes.position.pass_start),
        make_assembler=partial(make, is_logged=False, **alone),
        decoders=decoders.copy(),
        counters=Counters(),
        workers=None,
        images=None,
        bad=None,
        tuner=None,
    )
    try:
        pipeline.start()
        while (item := pipeline.get()).is_end:
            pass
        return item.batch
    finally:
        pipeline.close()
