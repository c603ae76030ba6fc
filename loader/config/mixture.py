"""Mixtures as users describe them: sources, their weights, and the end of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ...storage.suggestions import did_you_mean, unknown_choice
from ..errors import ConfigError
from ..order.selecting import Subset

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..dataset.splits import Split
    from ..decoding.decode import DecodeChoice
    from ..decoding.row_work import Sample
    from ..formats.shard import ShardFormat
    from ..order.mixture import Stop, WeightChange
    from ..packing.config import Packing
    from .checks import SampleWeights
    from .keep import KeepChoice


class _Inherited:
    """The default of a source's arguments: one object in each process, also where a source is copied or sent."""

    def __repr__(self) -> str:
        return "<the loader's>"

    def __reduce__(self) -> str:
        return "_INHERITED"


_INHERITED: Any = _Inherited()
_MOST_SOURCES = 1 << 12


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Name a mixture's source in the notes of what is raised inside; "" names none, where a data set is alone."""
    try:
        yield
    except Exception as exc:
        if name:
            exc.add_note(f"in the source {name!r} of the mixture")
        raise


@dataclass(frozen=True)
class Source:
    """One data set of a mixture. What is not given is the loader's argument of the same name.

    Args:
        url: what a loader takes as its source: a prefix, a shard, a pattern, a list of these, or a ``Manifest``.
        weight: its share of the mixture's samples, relative to the other weights; 0 to begin with it later.
        columns, decode, transform, format, storage_options: as those of the loader, for this data set alone.
        keep, may_drop: which of its samples stay, as the loader's. It then gives as many outputs as before, of what
            is left.
        packing: how its documents are packed, as the loader's; None to leave them as they are. Documents of several
            sources are not packed together, and shares count sequences.
        split, subset: the part of it that is read, as the loader's.
        weights: draw its samples with replacement, in proportion to these, as the loader's of one data set. ``weight``,
            its share of the mixture, stays what it is.
    """

    url: str | PathLike[str] | Sequence[str | PathLike[str]] | Manifest
    _: KW_ONLY
    weight: float = 1.0
    columns: Sequence[str] | None = _INHERITED
    decode: DecodeChoice = _INHERITED
    keep: KeepChoice | None = _INHERITED
    transform: Callable[..., Sample | None] | None = _INHERITED
    may_drop: bool = _INHERITED
    packing: Packing | None = _INHERITED
    format: ShardFormat | str | None = _INHERITED
    storage_options: Mapping[str, Any] | None = _INHERITED
    split: Split | None = None
    subset: Subset | None = None
    weights: SampleWeights | None = None

    def __post_init__(self) -> None:
        if self.subset is not None and not isinstance(self.subset, Subset):
            raise ConfigError(f"Source(subset={self.subset!r}): give a Subset, such as Subset.share(0, 0.1)")

    def fill(self, **defaults: Any) -> Source:
        """Fill in the loader's arguments where the source has none of its own."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is _INHERITED}
        filled = replace(self, **missing)
        if "may_drop" in missing and filled.transform is None:  # it is about other sources' transforms
            return replace(filled, may_drop=False)
        return filled


@dataclass(frozen=True)
class Mixture:
    """Several data sets as one stream of samples, in proportion to weights.

    ``Mixture({"s3://web/": 0.7, "s3://code/": 0.3})``. Pass it to a loader in the place of a source. Each global batch
    has each source's share to within one sample. A source's samples come exactly once in each of *its* epochs,
    whatever the weights and wherever the mixture's epochs end. Where sources drop samples or pack them, all this is
    about what is left, or about sequences.

    Args:
        sources: names to a weight (the name is then the URL), to a ``Source``, or to another ``Mixture``, whose sources
            are then named "outer/inner" and share out its ``weight``.
        stop: when an epoch of the mixture ends. "first_exhausted": with the batch by which the first source has given
            as many samples as it has; "all_exhausted": when each has, so that small ones repeat; "never": it is
            endless, and the loader has no ``len``. The next epoch goes on in each source where this one ended.
        schedule: positions (samples of all ranks since the run began) to the weights from there on, by name; sources
            that are not named keep theirs.
        stratified: weights are whole numbers of samples: exactly so many of each source in every global batch, or in
            each part of it if it is a multiple of their sum.
        weight: of a mixture inside another, its share.

    A loader's own arguments hold for all sources together, or for those that do not set them. ``lanes`` are the same
    for all, "auto" for ``window`` and ``piece`` fits each; ``max_bad_chunks`` counts the bad chunks of all, each
    replaced by another of its source; ``on_error`` and ``bucket`` work in each source by itself; ``cost`` needs an
    index of its name beside each; ``processes`` needs the same ``transform``, ``decode`` and ``may_drop`` for all.
    ``batch_tokens`` and ``weights`` are refused.

    Raises:
        ConfigError: a weight or a name is not possible; says which and what would be.
    """

    sources: Mapping[str, float | Source | Mixture]
    stop: Stop | None = None
    schedule: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    stratified: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise ConfigError(f"Mixture({self.sources!r}): give a mapping from at least one name or URL to its weight")
        if self.stop is not None and self.stop not in get_args(_mixing().Stop):
            raise ConfigError(unknown_choice("stop", self.stop, get_args(_mixing().Stop)))
        if not isinstance(self.stratified, bool):
            raise ConfigError(f"stratified={self.stratified!r}: must be True or False")
        check_weight("Mixture(weight=)", self.weight)
        for name, value in self.sources.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"Mixture: {name!r} is no name of a source; use its URL, or a name and a Source(url)")
            check_weight(name, value.weight if isinstance(value, Source | Mixture) else value)
            if isinstance(value, Mixture) and (value.stop is not None or value.stratified):
                raise ConfigError(
                    f"Mixture: {name!r} is a mixture inside another and has stop={value.stop!r}, "
                    f"stratified={value.stratified}; only the outermost one says these"
                )
        names = [leaf for leaf, _ in self.leaves()]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ConfigError(
                f"Mixture: two sources are called {twice!r} (those of a mixture inside have its name in front); "
                "orders, states and metrics are told apart by name, so give one another name"
            )
        if len(names) > _MOST_SOURCES:
            raise ConfigError(f"Mixture: {len(names)} sources, of at most {_MOST_SOURCES}")
        if not isinstance(self.schedule, Mapping):
            raise ConfigError(f"schedule={self.schedule!r}: give a mapping from positions to the weights from there on")
        for position, weights in self.schedule.items():
            check_position("schedule", position, 1)
            for name, weight in _own_names(weights, list(self.sources), f"schedule[{position}]").items():
                check_weight(name, weight)
        for change in self.changes():
            self._check_sum(change)

    def _check_sum(self, change: WeightChange) -> None:
        check_weights(dict(zip((leaf for leaf, _ in self.leaves()), change.weights, strict=True)), self.stratified)

    def packs(self, packing: Packing | None) -> bool:
        """Return whether any source is packed by a loader that has this ``packing``."""
        return any(source.fill(packing=packing).packing is not None for _, source in self.leaves())

    def drops(self, **defaults: Any) -> bool:
        """Return whether any source drops or packs samples in a loader that has these arguments.

        Raises:
            ConfigError: ``may_drop`` is given, and no source has a transform.
        """
        filled = [source.fill(**defaults) for _, source in self.leaves()]
        if defaults.get("may_drop") and all(source.transform is None for source in filled):
            raise ConfigError("may_drop=True without a transform: it says that a transform= may return None")
        return any(of.keep is not None or bool(of.may_drop) or of.packing is not None for of in filled)

    def leaves(self) -> Iterator[tuple[str, Source]]:
        """Yield every source by its full name, nested ones included, in order."""
        for name, value in self.sources.items():
            if isinstance(value, Mixture):
                for inner, source in value.leaves():
                    yield f"{name}/{inner}", source
            else:
                yield name, value if isinstance(value, Source) else Source(name, weight=value)

    def changes(self) -> tuple[WeightChange, ...]:
        """List the weights of all sources from each position on at which some change, from 0 on."""
        positions = sorted({0, *self._positions()})
        return tuple(_mixing().WeightChange(position, tuple(self._weights_at(position))) for position in positions)

    def _positions(self) -> Iterator[int]:
        yield from map(int, self.schedule)
        for value in self.sources.values():
            if isinstance(value, Mixture):
                yield from value._positions()

    def _weights_at(self, position: int) -> Iterator[float]:
        """Yield the weights of all leaves at a position: those of an inner mixture are shares of its own."""
        current = {n: v.weight if isinstance(v, Source | Mixture) else v for n, v in self.sources.items()}
        for start in sorted(start for start in self.schedule if start <= position):
            current.update(self.schedule[start])
        for name, value in self.sources.items():
            if isinstance(value, Mixture):
                inside = list(value._weights_at(position))
                total = sum(inside)
                yield from (float(current[name]) * weight / total if total else 0.0 for weight in inside)
            else:
                yield float(current[name])


def _mixing() -> Any:
    """Import the module of a mixture's arithmetic, which a loader of one data set does without."""
    from ..order import mixture

    return mixture


def check_weight(name: str, weight: object) -> None:
    """Raise ConfigError unless a weight is a finite number of at least 0."""
    is_number = isinstance(weight, int | float | np.integer | np.floating) and not isinstance(weight, bool)
    if not is_number or not 0 <= float(weight) < float("inf"):  # type: ignore[arg-type]
        raise ConfigError(f"the weight of {name!r} is {weight!r}; weights are finite numbers of at least 0")


def check_position(name: str, position: object, least: int) -> None:
    """Raise ConfigError unless a position is a number of samples of a run, from ``least`` on."""
    is_whole = isinstance(position, int | np.integer) and not isinstance(position, bool)
    if not is_whole or not least <= int(position) < _mixing().MOST_SAMPLES:  # type: ignore[call-overload]
        raise ConfigError(
            f"{name}: {position!r} is no position; use whole numbers of samples from {least} on, below 2**62"
        )


def check_weights(weights: Mapping[str, float], stratified: bool = False) -> None:
    """Raise ConfigError unless weights can share out batches."""
    for name, weight in weights.items():
        check_weight(name, weight)
        if stratified and weight != int(weight):
            raise ConfigError(
                f"stratified: {name!r} has {weight!r}; give whole numbers of samples, or leave out stratified"
            )
    if not sum(weights.values()):
        raise ConfigError(f"all weights are 0 ({', '.join(map(repr, weights))}); give at least one that is positive")


def _own_names(weights: object, names: Sequence[str], where: str) -> Mapping[str, float]:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where}: {weights!r} is no mapping from names to weights")
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ConfigError(f"{where} names {unknown}, and the sources are {list(names)}{did_you_mean(unknown, names)}")
    return weights


def update_weights(
    names: Sequence[str], current: Sequence[float], weights: Mapping[str, float], stratified: bool
) -> tuple[float, ...]:
    """Update the weights of all sources by full name with those in ``weights``.

    Raises:
        ConfigError: a name or a weight is not possible.
    """
    merged = {**dict(zip(names, current, strict=True)), **_own_names(weights, names, "set_weights")}
    check_weights(merged, stratified)
    return tuple(float(merged[name]) for name in names)
