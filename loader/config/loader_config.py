"""All arguments of a loader, checked before anything is opened, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..decoding.decode import DecodeChoice, RawValues, check_decode, decodes_on_device
from ..decoding.row_work import BatchOptions
from ..errors import ConfigError
from .checks import (
    LastBatch,
    PlaceChoice,
    SampleWeights,
    check_at_least,
    check_last_batch,
    check_order,
    check_place,
    check_selection,
    check_shuffle,
    make_share,
    parse_cache_limit,
)
from .costs import CostArguments
from .errors import ErrorArguments, OnError
from .groups import GroupArguments
from .mixture import Mixture, Source, naming_source
from .reshaping import Reshaping
from .tuning import read_tuning

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...storage.options import MappedReads
    from ..dataset.manifest import Manifest
    from ..dataset.splits import Split
    from ..decoding.images import device_codec
    from ..decoding.row_work import Sample
    from ..formats.shard import ShardFormat
    from ..order.costs.buckets import Bucket
    from ..order.costs.budget import TokenBudget
    from ..order.costs.costs import Cost
    from ..order.plan import Choice, Share
    from ..order.selecting import Subset
    from ..packing.config import Packing
    from ..packing.packer import Packer
    from ..pipeline.tuning import TuningChoice
    from ..ranks.model_parallel import FieldsByStage, SequenceCut
    from ..reading.bad.file import Paths
    from .keep import KeepChoice

# Arguments that a mixture cannot have as a whole, and what to do instead.
_OF_ONE_DATA_SET = {
    "weights": "the weights of sources are in the Mixture, and those of a source's samples in Source(weights=)",
    "batch_tokens": "the weights of a mixture count samples; give batch_size= or global_batch_size=",
}


@dataclass(frozen=True, kw_only=True)
class AskedSource:
    """A data set that a loader opens, with all arguments that concern it.

    ``name`` is its name in a mixture, "" where it is read alone. ``subset`` and ``weights`` are checked once
    its samples are known.
    """

    name: str
    given: Source
    subset: Subset | None
    weights: SampleWeights | None = None

    @property
    def drops(self) -> bool:
        return self.given.keep is not None or bool(self.given.may_drop) or self.packs

    @property
    def packs(self) -> bool:
        return self.given.packing is not None


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The arguments of a loader, as ``DistributedDataLoader`` describes them, and what follows from them.

    Raises:
        ConfigError, PartitionError: an argument, or a combination of arguments, cannot work; says what would.
    """

    source: str | PathLike[str] | Sequence[str | PathLike[str]] | Manifest | Mixture
    split: Split | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    lanes: Choice = "auto"
    window: Choice = "auto"
    piece: Choice = "auto"
    subset: Subset | None = None
    weights: SampleWeights | None = None
    columns: Sequence[str] | None = None
    decode: DecodeChoice = "auto"
    raw: RawValues = "bytes"
    keep: KeepChoice | None = None
    transform: Callable[..., Sample | None] | None = None
    may_drop: bool = False
    packing: Packing | None = None
    collate: Callable[[list[Sample]], Any] | None = None
    cost: str | Cost | None = None
    bucket: str | Bucket | None = None
    batch_tokens: int | TokenBudget | None = None
    last_batch: LastBatch = "drop"
    device: str | torch.device | None = None
    threads: int | Literal["auto"] = "auto"
    fetch_threads: int | Literal["auto"] = "auto"
    read_ahead: int | str = "auto"
    autotune: bool | Literal["auto"] = "auto"
    processes: int | Literal["auto"] = "auto"
    place: PlaceChoice = "threads"
    memory_limit: int | str = "auto"
    cache_dir: str | PathLike[str] | None = None
    cache_limit: int | str | None = None
    rank: int | None = None
    world_size: int | None = None
    mesh: DeviceMesh | None = None
    data_dims: Sequence[str] | None = None
    fields_by_stage: FieldsByStage | None = None
    sequence_cut: SequenceCut | None = None
    storage_options: Mapping[str, Any] | None = None
    with_ids: bool = False
    format: ShardFormat | str | None = None
    audit_dir: str | PathLike[str] | None = None
    on_error: OnError = "stop"
    max_errors: int | float | None = None
    max_bad_chunks: int | None = None
    quarantine: str | PathLike[str] | None = None
    avoid: Paths | None = None

    # What follows, in the order in which it is found.
    costs: CostArguments = field(init=False)
    share: Share = field(init=False)  # of global batches, before it is cut by costs
    batch_options: BatchOptions = field(init=False)
    sources: tuple[AskedSource, ...] = field(init=False)
    reshapings: tuple[Reshaping | None, ...] = field(init=False)  # what each source drops or packs
    errors: ErrorArguments = field(init=False)
    group: GroupArguments = field(init=False)
    cuda: torch.device | None = field(init=False)
    codec: device_codec.DeviceCodec | None = field(init=False)
    tuning: TuningChoice = field(init=False)
    cache_bytes: int | None = field(init=False)

    def __post_init__(self) -> None:
        if self.is_mixture:
            self._refuse_whole()
        check_shuffle(self.shuffle)
        check_order(lanes=self.lanes, window=self.window, piece=self.piece)
        is_audited, is_weighted = self.audit_dir is not None, self.weights is not None
        if isinstance(self.source, Mixture):
            is_weighted = any(source.weights is not None for _, source in self.source.leaves())
        check_selection(shuffle=self.shuffle, is_weighted=is_weighted, is_audited=is_audited)
        check_last_batch(self.last_batch)
        sizes = self.batch_size, self.global_batch_size
        self._set(
            costs=CostArguments.read(
                self.cost, self.bucket, self.batch_tokens, last_batch=self.last_batch, batch_sizes=sizes
            )
        )
        self._set(share=self._make_share())
        self._set(
            batch_options=BatchOptions(
                transform=self.transform,
                collate=self.collate,
                with_ids=self.with_ids,
                pad=self.last_batch == "pad",
                seed=self.seed,
                may_drop=self.may_drop,
                goes_on=self.on_error != "stop",
            )
        )
        self._set(sources=self._read_sources())
        if not self.is_mixture:
            self._set(reshapings=(self._read_reshaping(self.sources[0], {}),))
        self._set(
            errors=ErrorArguments.read(
                self.on_error,
                self.max_errors,
                self.max_bad_chunks,
                self.quarantine,
                self.avoid,
                drops=self.drops,
                packs=self.packs,
                by_stage=self.fields_by_stage is not None,
                has_budget=self.costs.budget is not None,
                audit_dir=self.audit_dir,
                is_mixture=self.is_mixture,
            )
        )
        asked_processes = 0 if self.processes == "auto" else self.processes
        check_at_least("processes", asked_processes, 0)
        check_place(self.place)
        check_decode(self.decode, self.raw, asked_processes)
        self._set(
            group=GroupArguments.read(
                self.fields_by_stage,
                self.sequence_cut,
                self.mesh,
                self.data_dims,
                max_bad_chunks=self.errors.max_bad_chunks or 0,
                may_drop=self.may_drop or any(each.given.may_drop is True for each in self.sources),
                keeps_by_all=any(callable(each.given.keep) for each in self.sources),
                packs=self.packs,
                has_collate=self.collate is not None,
            )
        )
        self._set(cuda=self._resolve_device())
        self._set(codec=self._open_codec(asked_processes))
        self._set(
            tuning=read_tuning(
                self.threads, self.fetch_threads, self.read_ahead, self.autotune, self.memory_limit, self.processes
            )
        )
        self._set(cache_bytes=parse_cache_limit(self.cache_dir, self.cache_limit))
        if self.is_mixture:  # errors of one source come after those of the loader
            packers: dict[int, Packer] = {}
            self._set(reshapings=tuple(self._read_reshaping(each, packers) for each in self.sources))

    def _set(self, **derived: Any) -> None:
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def is_mixture(self) -> bool:
        return isinstance(self.source, Mixture)

    @property
    def drops(self) -> bool:
        """Return whether any source drops or packs samples, so that only reading determines the batches."""
        return self.on_error == "skip" or any(each.drops for each in self.sources)

    @property
    def packs(self) -> bool:
        return any(each.packs for each in self.sources)

    @property
    def maps_files(self) -> MappedReads:
        """The values that may be read from mapped files only when due: an error in a chunk then ends the run."""
        if self.errors.goes_on or self.errors.max_bad_chunks:
            return False
        return "views" if self.raw == "view" else True

    def _refuse_whole(self) -> None:
        for name, cure in _OF_ONE_DATA_SET.items():
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(f"{name}= with a Mixture: {cure}")

    def _make_share(self) -> Share:
        sizes = (self.batch_size, self.global_batch_size) if self.costs.budget is None else (1, None)
        pad = self.last_batch == "pad"
        return make_share(self.rank, self.world_size, *sizes, pad=pad, mesh=self.mesh, data_dims=self.data_dims)

    def _read_sources(self) -> tuple[AskedSource, ...]:
        inherited = {
            name: getattr(self, name)
            for name in ("columns", "decode", "keep", "transform", "may_drop", "packing", "format", "storage_options")
        }
        if not isinstance(self.source, Mixture):
            given = Source(self.source, split=self.split, **inherited)
            return (AskedSource(name="", given=given, subset=self.subset, weights=self.weights),)
        filled = [(name, source.fill(**inherited)) for name, source in self.source.leaves()]
        if self.may_drop and all(source.transform is None for _, source in filled):
            raise ConfigError("may_drop=True without a transform: it says that a transform= may return None")
        if self.split is not None:
            filled = [(name, replace(source, split=source.split or self.split)) for name, source in filled]
        return tuple(
            AskedSource(name=name, given=source, subset=source.subset or self.subset, weights=source.weights)
            for name, source in filled
        )

    def _read_reshaping(self, asked: AskedSource, packers: dict[int, Packer]) -> Reshaping | None:
        """Read a source's arguments for dropping and packing. Equal settings share a packer and its tokenizer."""

        def open_packer(packing: Packing) -> Packer:
            from ..packing.packer import Packer

            if id(packing) not in packers:
                packers[id(packing)] = Packer.open(packing)
            return packers[id(packing)]

        of = asked.given
        with naming_source(asked.name):
            return Reshaping.of(
                of.keep, of.may_drop, of.transform, of.packing, self.costs, self.on_error, open_packer=open_packer
            )

    def _resolve_device(self) -> torch.device | None:
        if self.device is None or str(self.device) == "cpu":
            return None
        from ..pipeline.device import resolve_cuda

        return resolve_cuda(self.device)

    def _open_codec(self, asked_processes: int) -> device_codec.DeviceCodec | None:
        """Open the codec for decoders that ask for the device; None where none does."""
        named = self.decode.items() if isinstance(self.decode, Mapping) else ()
        fields = sorted(name for name, decoder in named if decodes_on_device(decoder))
        if not fields:
            return None
        needs_host = {
            "transform=": self.transform is not None,
            "collate=": self.collate is not None,
            "processes=": asked_processes > 0,
            "keep=, may_drop=, packing= or on_error='skip'": self.drops and not self.is_mixture,
            "a Mixture": self.is_mixture,
        }
        for name, is_given in needs_host.items():
            if is_given:
                raise ConfigError(
                    f"decode[{fields[0]!r}]=ImageDecoder(device='cuda') with {name}: its images are on the device, "
                    "whole batches at once, and never samples in host memory; leave out "
                    f"{name}, or the decoder's device="
                )
        from ..decoding.images import device_codec

        return device_codec.open_codec(self.cuda)
