"""Kinds of sources: those with the same decoders, transform and layout of values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..decoding.decode import FieldDecoders, decodes_on_device
from ..errors import ConfigError
from ..order.cached import cached_property

if TYPE_CHECKING:
    from ..config.loader_config import LoaderConfig
    from ..decoding.batch import BatchMaker
    from ..decoding.images.kind import ImageFields
    from ..reading.chunk_source import ChunkSource
    from .sources import OpenSource, Sources


@dataclass(frozen=True, slots=True)
class Kind:
    """Sources that are decoded and transformed alike: their numbers, decoders and transform.

    ``may_drop``: the transform may return None.
    """

    sources: tuple[int, ...]
    decoders: FieldDecoders
    transform: Any
    may_drop: bool = False

    def maker(self, maker: BatchMaker) -> BatchMaker:
        """Adapt the maker to rows of this kind."""
        options = replace(maker.options, transform=self.transform, may_drop=self.may_drop)
        return replace(maker, decoders=self.decoders, options=options)

    def copy(self) -> Kind:
        """Copy the kind, with decoders that settle for themselves."""
        return replace(self, decoders=self.decoders.copy())


def group_kinds(sources: Sequence[OpenSource]) -> list[tuple[int, ...]]:
    """Group the sources by equal ``decode`` and ``transform``; return their numbers."""
    groups: list[list[int]] = []
    for number, source in enumerate(sources):
        for group in groups:
            other = sources[group[0]].options
            drops = other.may_drop == source.options.may_drop
            if drops and other.transform is source.options.transform and _same(other.decode, source.options.decode):
                group.append(number)
                break
        else:
            groups.append([number])
    return [tuple(group) for group in groups]


def group_layouts(sources: Sequence[OpenSource]) -> list[tuple[int, ...]]:
    """Split these groups by memory layout, for gathering and decoding together."""
    parted: list[tuple[int, ...]] = []
    for group in group_kinds(sources):
        by_layout: dict[Hashable, list[int]] = {}
        for number in group:
            by_layout.setdefault(sources[number].chunks.layout, []).append(number)
        parted.extend(map(tuple, by_layout.values()))
    return parted


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
    return bool(one is other or one == other)


def open_kinds(config: LoaderConfig, sources: Sources) -> list[Kind]:
    """Open the kinds of a loader's sources, each with decoders of its own. Streams are worked on source by source.

    Raises:
        ConfigError: worker processes, which have one transform, are asked for, and there are several.
    """
    groups, processes = group_kinds(sources), config.tuning.asked_processes
    if processes and len(groups) > 1:
        one, other = (sources[group[0]].name for group in groups[:2])
        raise ConfigError(
            f"processes={processes} with sources that have transform= or decode= of their own ({one!r} and "
            f"{other!r}): worker processes run one; use threads (processes=0), or one transform for all sources"
        )
    groups = [(number,) for number in range(len(sources))] if sources.has_streams else group_layouts(sources)
    return [_make_kind(config, sources, group) for group in groups]


def _make_kind(config: LoaderConfig, sources: Sources, group: tuple[int, ...]) -> Kind:
    options = sources[group[0]].options
    decoders = FieldDecoders(options.decode, config.raw, config.codec)
    named = options.decode.values() if isinstance(options.decode, Mapping) else ()
    if sources.is_mixed and any(map(decodes_on_device, named)):
        raise ConfigError(
            f"Source(decode=...) of {sources[group[0]].name!r}: an ImageDecoder(device='cuda') does not go with a "
            "Mixture; leave out its device="
        )
    decoders.are_images = _ImagesOfAll({sources[number].name: sources[number].chunks for number in group})
    decoders.of_columns = all(sources[number].manifest.has_columns for number in group)
    return Kind(group, decoders, options.transform, bool(options.may_drop))


class _ImagesOfAll:
    """The answer whether an ambiguously named field holds images: in all sources of a kind, or in none."""

    def __init__(self, chunks: Mapping[str, ChunkSource]) -> None:
        self._chunks = chunks

    @cached_property
    def _fields(self) -> dict[str, ImageFields]:
        from ..decoding.images.kind import ImageFields

        return {source: ImageFields(chunks) for source, chunks in self._chunks.items()}

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
