"""What a loader of a mixture is made of, where a loader of one data set has its manifest, order and assembler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..decoding.batch import BatchOptions
from ..decoding.decode import FieldDecoders, RawValues
from ..decoding.first_values import ImageFields
from ..errors import ConfigError
from ..metrics import LoaderMetrics, MixtureMetrics, SourceProgress
from ..order.mixed_spans import SourceOrder
from ..pipeline.assembler import Assembler, Equipment, Start
from .assembler import MixtureAssembler
from .batch import Kind, group_kinds
from .fields import check_names
from .mixture import Mixture
from .position import MixturePosition
from .quarantine import MixedQuarantine
from .sources import JointChunks, OpenSources, open_sources

# Arguments of a loader that a mixture cannot have as a whole, and what to do instead.
_OF_SOURCES = {
    "subset": "give each source its own: Source(url, subset=...)",
    "split": "give each source its own: Source(url, split=...)",
    "weights": "the weights of sources are in the Mixture; weights of single samples are for a loader of one data set",
    "keep": "sources are not filtered yet; filter each data set by a loader of its own, or write what is kept",
    "may_drop": "a mixture's transforms must keep every sample; filter each data set by a loader of its own",
    "packing": "documents of a mixture are not packed yet; pack each data set by a loader of its own",
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

    sources: OpenSources
    position: MixturePosition
    chunks: JointChunks
    kinds: Sequence[Kind]
    quarantine: MixedQuarantine

    @property
    def orders(self) -> Sequence[SourceOrder]:
        return self.position.orders

    def batch_options(self, options: BatchOptions) -> BatchOptions:
        """The loader's, with what a mixture adds: of several kinds, each has its own transform."""
        transform = self.kinds[0].transform if len(self.kinds) == 1 else None
        return replace(options, transform=transform, identify=self.sources.identify)

    @property
    def make_assembler(self) -> Callable[[Equipment, Start], Assembler]:
        return partial(
            MixtureAssembler,
            sources=self.sources,
            kinds=self.kinds,
            quarantine=self.quarantine,
            place=self.position.place,
        )

    def add_progress(self, metrics: LoaderMetrics) -> MixtureMetrics:
        """A loader's metrics with those of its sources."""
        _, _, here = self.position.cursor()
        progress = {}
        for source, taken in zip(self.sources, here.taken, strict=True):
            length = source.manifest.config.get("seq_len")
            tokens = None if length is None else taken * int(length)
            progress[source.name] = SourceProgress(samples=taken, epochs=taken / source.num_samples, tokens=tokens)
        return MixtureMetrics(**vars(metrics), run_samples=here.position, sources=progress)


def open_mixture(
    mixture: Mixture,
    *,
    opening: Mapping[str, Any],
    ordering: Mapping[str, Any],
    raw: RawValues,
    processes: int,
    max_bad_chunks: int,
) -> MixtureParts:
    """Open all sources and compare what they hold; ``opening`` and ``ordering`` are the arguments of these steps.

    Raises:
        ConfigError, PartitionError, DatasetError, FormatError, StorageError: as a loader of one data set.
    """
    sources = open_sources(mixture, **opening)
    try:
        check_names(sources)
        position = MixturePosition(mixture, sources, **ordering)
        groups = group_kinds(sources)
        if processes and len(groups) > 1:
            one, other = (sources[group[0]].name for group in groups[:2])
            raise ConfigError(
                f"processes={processes} with sources that have transform= or decode= of their own ({one!r} and "
                f"{other!r}): worker processes run one; use threads (processes=0), or one transform for all sources"
            )
        chunks = JointChunks(sources, [source.chunks for source in sources])
        return MixtureParts(
            sources=sources,
            position=position,
            chunks=chunks,
            kinds=[_make_kind(sources, group, raw, processes) for group in groups],
            quarantine=MixedQuarantine(sources, [source.chunks for source in sources], max_bad_chunks),
        )
    except BaseException:
        sources.close()
        raise


def _make_kind(sources: OpenSources, group: tuple[int, ...], raw: RawValues, processes: int) -> Kind:
    options = sources[group[0]].options
    decoders = FieldDecoders(options.decode, raw, processes)
    decoders.are_images = _ImagesOfAll({sources[number].name: ImageFields(sources[number].chunks) for number in group})
    return Kind(group, decoders, options.transform)


class _ImagesOfAll:
    """Whether a field whose name says nothing holds images, in all sources of a kind or in none."""

    def __init__(self, fields: Mapping[str, ImageFields]) -> None:
        self._fields = fields

    def __call__(self, name: str) -> bool:
        answers = {source: fields(name) for source, fields in self._fields.items()}
        if len(set(answers.values())) > 1:
            images = [source for source, answer in answers.items() if answer]
            others = [source for source, answer in answers.items() if not answer]
            raise ConfigError(
                f"the sources of the mixture differ: the field {name!r} holds images in {images} and none in {others}; "
                f"say what it holds with decode={{{name!r}: ...}}"
            )
        return any(answers.values())
