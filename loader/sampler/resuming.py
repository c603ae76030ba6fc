"""Resuming a mixture with other sources or weights than its state has: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import StateMismatchError
from ..order.mixture import WeightChange

if TYPE_CHECKING:
    from ..order.mixture_state import MixtureState, SourceState
    from ..sources.sources import OpenSource, Sources


def identity_of(source: OpenSource) -> dict[str, Any]:
    """Make the identity of a source's data: its name and its samples."""
    return {
        "name": source.name,
        "fingerprint": source.manifest.fingerprint,
        "num_samples": source.num_samples,
        "selection": {} if source.selection is None else source.selection.to_dict(),
    }


def match_sources(sources: Sources, state: MixtureState) -> list[SourceState | None]:
    """Match each source to a state's: by name or, under a new name, by equal data; None without a match.

    A source under a new name that drops or packs differently from the state's begins anew.

    Raises:
        StateMismatchError: a source of the same name has other data.
    """
    by_name = {source.name: source for source in (*state.parted, *state.sources)}
    left = {name: source for name, source in by_name.items() if name not in sources.names}
    found: list[SourceState | None] = []
    for source in sources:
        identity = identity_of(source)
        match = by_name.get(source.name)
        if match is None:
            same = [name for name, old in left.items() if _is_same(old, identity) and yields_alike(source, old)]
            match = left.pop(same[0]) if len(same) == 1 else None
        elif not _is_same(match, identity):
            raise StateMismatchError(
                f"the source {source.name!r} is another data set than in the state (fingerprint {match.fingerprint}, "
                f"{match.num_samples:,} samples there; {identity['fingerprint']}, {identity['num_samples']:,} here, or "
                "another subset); give it a new name to begin it anew"
            )
        found.append(match)
    return found


def yields_alike(source: OpenSource, old: SourceState) -> bool:
    """Return whether a source drops or packs samples as a state says, as far as states know.

    One that drops nothing but bad samples goes on where all were delivered.
    """
    if source.drops_only_bad and not old.stream:
        return True
    kind = source.stream_kind
    return all(old.stream.get(name) == kind.get(name) for name in ("kind", "packing", "unit"))


def refuse_other_stream(name: str, had: Mapping[str, Any], here: Mapping[str, Any]) -> NoReturn:
    """Raise StateMismatchError: a state's source yields other outputs than this one; names the known differences."""
    kinds = {"filter": "drops samples", "packing": "packs documents", None: "delivers every sample"}
    before, now = (kinds.get(stream.get("kind"), "does something unknown") for stream in (had, here))
    if before == now:
        now = "packs them otherwise (seq_len, method, tokenizer, eos, buffer_size or another setting of Packing)"
    raise StateMismatchError(
        f"the source {name!r} {before} in the state's run, and {now} here, so that its position means nothing here; "
        "give it the same keep=, may_drop=, packing= and on_error='skip' as there, or a new name to begin it anew"
    )


def _is_same(old: SourceState, identity: Mapping[str, Any]) -> bool:
    return all(getattr(old, name) == identity[name] for name in ("fingerprint", "num_samples", "selection"))


def merge_changes(
    names: Sequence[str],
    given: Sequence[WeightChange],
    state: MixtureState,
    known: Sequence[SourceState | None],
    stratified: bool,
) -> tuple[tuple[WeightChange, ...], list[str]]:
    """Merge the weights from a state's epoch on, with notes: the state's up to its position, then ``given``.

    Where the mixture is that of the state's loader, all are the state's. ``known`` is what
    ``match_sources`` found of the sources called ``names``.
    """
    in_state = [source.name for source in state.sources]
    columns = [None if old is None or old.name not in in_state else in_state.index(old.name) for old in known]
    news = _tell_sources(names, state, known, columns)
    if columns == list(range(len(in_state))):
        if state.given == tuple(given):
            return state.changes, news
        news.append(f"weights change from here on (sample {state.here[0]:,} of the run)")
    before: list[WeightChange] = []
    for change in state.changes:
        weights = tuple(0.0 if column is None else change.weights[column] for column in columns)
        if change.position < state.here[0] and any(weights) and not stratified:
            before.append(WeightChange(change.position if before else min(change.position, state.start[0]), weights))
    now = max((change for change in given if change.position <= state.here[0]), key=lambda change: change.position)
    first = WeightChange(state.here[0] if before else min(now.position, state.start[0]), now.weights)
    after = [change for change in given if change.position > state.here[0]]
    return (*before, first, *after), news


def _tell_sources(
    names: Sequence[str],
    state: MixtureState,
    known: Sequence[SourceState | None],
    columns: Sequence[int | None],
) -> list[str]:
    news = []
    for name, old, column in zip(names, known, columns, strict=True):
        if old is None:
            news.append(f"{name!r} is new")
            continue
        if old.name != name:
            news.append(f"{old.name!r} is now {name!r}")
        if column is None:
            news.append(f"{name!r} is back after {old.taken:,} samples")
    gone = [old for number, old in enumerate(state.sources) if number not in columns]
    return news + [f"{old.name!r} is left out after {old.taken:,} samples" for old in gone]
