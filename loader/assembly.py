"""What delivers a loader's batches: the plain assembler, or one of lanes that yield what is kept of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .arguments import check_names
from .cost_arguments import CostArguments
from .dataset.manifest import Manifest
from .decoding.decode import FieldDecoders
from .errors import ConfigError
from .metrics import Counters
from .order.costs import SampleCosts
from .order.plan import Share
from .order.selection import Selection
from .packing.config import Packing
from .packing.packer import Packer
from .passes import Passes
from .pipeline.assembler import Assembler, Equipment, Start
from .pipeline.pipeline import Pipeline
from .pipeline.plain import PlainAssembler
from .position import Position
from .reading.quarantine import Quarantine
from .stream_position import StreamPosition
from .streams.assembler import StreamAssembler
from .streams.channel import MemoryChannel, number_loader, open_channel
from .streams.keep import KeepChoice, Sieve
from .streams.ledger import Ledgers
from .streams.pack_work import PackWork
from .streams.work import FilterWork, WindowWork, mean_row_bytes

MakeAssembler = Callable[[Equipment, Start], Assembler]


@dataclass(frozen=True, slots=True)
class Reshaping:
    """What changes the number of samples: ``sieve`` asks ``keep=``, with ``may_drop`` the transform may return None,
    ``packer`` makes sequences of documents, and with ``skips`` bad samples are dropped."""

    sieve: Sieve | None
    may_drop: bool
    packer: Packer | None
    has_transform: bool
    skips: bool = False

    @staticmethod
    def of(
        keep: KeepChoice | None,
        may_drop: object,
        transform: object,
        packing: Packing | None,
        costs: CostArguments,
        on_error: object = "stop",
    ) -> Reshaping | None:
        """None where every sample is delivered. Raises ConfigError where the arguments do not fit each other."""
        if not isinstance(may_drop, bool):
            raise ConfigError(f"may_drop={may_drop!r}: must be True or False")
        if may_drop and transform is None:
            raise ConfigError("may_drop=True without a transform: it says that transform= may return None")
        if packing is not None and not isinstance(packing, Packing):
            raise ConfigError(f"packing={packing!r}: give a Packing, such as Packing(seq_len=2048)")
        skips = on_error == "skip"
        if keep is None and not may_drop and packing is None and not skips:
            return None
        given = {"cost": costs.cost, "bucket": costs.bucket, "batch_tokens": costs.budget}
        told = [f"{name}=" for name, value in given.items() if value is not None]
        if told:
            streams = {"keep=": keep is not None, "may_drop=True": may_drop, "packing=": packing is not None}
            streams["on_error='skip'"] = skips
            raise ConfigError(
                f"{' and '.join(told)} with {next(name for name, is_given in streams.items() if is_given)}: costs are "
                "known of samples as they are stored, not of those that are left or of sequences; leave out one of the "
                "two, or select by subset="
            )
        packer = None if packing is None else Packer.open(packing)
        return Reshaping(None if keep is None else Sieve(keep), may_drop or skips, packer, transform is not None, skips)

    def columns_of_batches(self, manifest: Manifest, columns: Sequence[str] | None) -> list[str] | None:
        """The ``columns`` that are decoded: of documents that are packed as they are read, what is packed.

        Raises:
            ConfigError: there is no such field, or it is not among ``columns``.
        """
        if self.packer is None or self.has_transform:
            return None if columns is None else list(columns)
        needed = list(self.packer.needed)
        known = list(manifest.fields if columns is None else columns)
        missing = [name for name in needed if name not in known]
        if missing:
            where = "the data set's fields" if columns is None else "columns="
            raise ConfigError(
                f"packing=Packing(field=...): {missing} is not among {where} {sorted(known)}; name the field that "
                "holds token ids, or text with tokenizer=, or make it in transform="
            )
        return needed

    def packing_for(self, manifest: Manifest) -> tuple[Packer, int] | None:
        """The packer, and how many samples it packs together."""
        return None if self.packer is None else (self.packer, self.packer.choose_unit(mean_row_bytes(manifest)))

    @property
    def asks_about_all(self) -> bool:
        """Whether ``keep=`` is asked about whatever fields are delivered."""
        return self.sieve is not None and self.sieve.columns is None

    def columns_to_read(self, manifest: Manifest, columns: Sequence[str] | None) -> list[str] | None:
        """The decoded ``columns``, and those that ``keep=`` asks about. Raises ConfigError where one is unknown."""
        if self.sieve is not None and self.sieve.columns is None and self.packer is not None:
            return None  # keep= gets the whole sample
        asked = [] if self.sieve is None or self.sieve.columns is None else list(self.sieve.columns)
        try:
            check_names(manifest, asked or None, None)
        except ConfigError as exc:
            raise ConfigError(f"keep=Keep(...): {exc}") from exc
        return None if columns is None else [*columns, *(name for name in asked if name not in columns)]


def make_position(reshaping: Reshaping | None, manifest: Manifest, *, share: Share, **options: Any) -> Position:
    """Where a loader begins; ``options`` are those of ``Position``."""
    if reshaping is None:
        return Position(manifest, share=share, **options)
    identity = f"{manifest.fingerprint}/{options['selection'] and options['selection'].to_dict()}"
    channel = partial(open_channel, number_loader(identity, share.world_size), share.world_size)
    ledgers = Ledgers(channel, rank=share.rank, world_size=share.world_size)
    packing = reshaping.packing_for(manifest)
    packed = None if packing is None else (packing[0].fingerprint, packing[1])
    return StreamPosition(manifest, ledgers=ledgers, packing=packed, share=share, **options)


def make_assembler(
    reshaping: Reshaping | None,
    position: Position,
    manifest: Manifest,
    *,
    last_batch: str,
    quarantine: Quarantine,
    selection: Selection | None,
    bucket_costs: SampleCosts | None,
    columns: Sequence[str] | None,
    is_logged: bool,
) -> MakeAssembler:
    """How pipelines of this loader get their assembler."""
    if reshaping is None:
        return partial(
            PlainAssembler,
            last_batch=last_batch,
            quarantine=quarantine,
            selection=selection,
            bucket_costs=bucket_costs,
        )
    assert isinstance(position, StreamPosition)
    return partial(
        StreamAssembler,
        last_batch=last_batch,
        selection=selection,
        make_work=_make_work(reshaping, manifest, quarantine, columns),
        is_logged=is_logged,
        ledgers=position.ledgers,
    )


def _make_work(
    reshaping: Reshaping, manifest: Manifest, quarantine: Quarantine, columns: Sequence[str] | None
) -> Callable[[Equipment], WindowWork]:
    read: dict[str, Any] = {"quarantine": quarantine, "sieve": reshaping.sieve, "columns": columns}
    packing = reshaping.packing_for(manifest)
    if packing is None:
        return partial(FilterWork, may_drop=reshaping.may_drop, skips=reshaping.skips, **read)
    packer, unit = packing
    return partial(PackWork, packer=packer, unit=unit, **read)


def peek_alone(make_pipeline: partial[Pipeline], decoders: FieldDecoders, passes: Passes) -> Any:
    """The first batch of a pass that would begin now, by a pipeline of its own beside the running one.

    Raises:
        ConfigError: there are several ranks, which would have to look at the same time.
    """
    passes.resources.check_open()
    passes.check_rank()
    if passes.share.world_size > 1:
        raise ConfigError(
            f"peek() of a loader that drops or packs samples, with world_size={passes.share.world_size}: what is "
            "left is known to all ranks together; look with a loader of rank=0, world_size=1"
        )
    make = make_pipeline.keywords["make_assembler"]
    alone = partial(make, ledgers=Ledgers(MemoryChannel, rank=0, world_size=1), is_logged=False)
    pipeline = make_pipeline(
        options=passes.tune(passes.position.order),
        start=passes.start(*passes.position.pass_start),
        make_assembler=alone,
        decoders=decoders.copy(),
        counters=Counters(),
        workers=None,
        bad=None,
    )
    try:
        pipeline.start()
        while (item := pipeline.get()).batch is None:
            pass
        return item.batch
    finally:
        pipeline.close()
