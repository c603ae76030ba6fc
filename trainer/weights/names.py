"""Map a source's tensors to a model's: renaming, ties, and what fits. Pure; no file is read here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from ...storage.suggestions import list_some
from ..errors import CheckpointMismatchError, TrainerConfigError

_ARROW = "=>"
_SHOWN = 20


@dataclass(frozen=True)
class TensorFacts:
    """Facts of a tensor before it is read; ``dtype`` is None for a format that torch cannot convert."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Patterns (``*`` and ``?``, as for files) of the names that may differ, each tuple for one kind of difference."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Assignment of a source's tensors to a model's.

    ``sources``: the source's name for each of the model's names that is loaded; ``kept``: the model's names that keep
    their initial values; ``ignored``: the source's names that go nowhere.
    """

    sources: Mapping[str, str]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]


def check_rules(key: str, rules: Sequence[str]) -> None:
    """Raise a TrainerConfigError for a rule that is none; a rule is ``PATTERN=>REPLACEMENT``, as for ``re.sub``."""
    for rule in rules:
        pattern, arrow, replacement = rule.partition(_ARROW)
        if not arrow or not pattern:
            raise TrainerConfigError(
                f"{key}={rule!r} is no rule; write PATTERN=>REPLACEMENT, as '^model[.]=>' to take a prefix away"
            )
        try:
            re.compile(pattern).sub(replacement, "")
        except (re.error, IndexError) as exc:
            raise TrainerConfigError(f"{key}={rule!r} is no regular expression: {exc}") from exc


def rename_all(names: Iterable[str], rules: Sequence[str]) -> dict[str, str]:
    """The new name of each, every rule applied in turn.

    Raises:
        CheckpointMismatchError: two get the same name, or one gets none.
    """
    renamed: dict[str, str] = {}
    for name in names:
        new = name
        for rule in rules:
            pattern, _, replacement = rule.partition(_ARROW)
            new = re.sub(pattern, replacement, new)
        renamed[name] = new
    twice = [name for name, count in Counter(renamed.values()).items() if count > 1]
    for new in twice or [name for name in renamed.values() if not name]:
        olds = ", ".join(old for old, its in renamed.items() if its == new)
        raise CheckpointMismatchError(f"the rules of renaming give {olds} the name {new!r}; make them more exact")
    return renamed


def assign(
    source: str,
    wanted: Mapping[str, TensorFacts],
    offered: Mapping[str, TensorFacts],
    *,
    rules: Sequence[str] = (),
    ties: Sequence[frozenset[str]] = (),
    allowed: Allowed | None = None,
) -> Assignment:
    """Decide what is loaded from where; ``ties`` are groups of the model's names for one tensor, of which one suffices.

    Raises:
        CheckpointMismatchError: naming all that is missing, unexpected or does not fit, and is not allowed.
    """
    allowed = allowed or Allowed()
    new_names = {new: old for old, new in rename_all(offered, rules).items()}
    _check_patterns(allowed, wanted, offered, new_names)
    group_of = {name: group for group in ties for name in group}
    missing: list[str] = []
    mismatched: list[str] = []
    kept: list[str] = []
    sources: dict[str, str] = {}
    for name, mine in wanted.items():
        if name not in new_names:
            group = group_of.get(name, frozenset({name}))
            if not any(other in new_names for other in group):
                (kept if _fits(name, allowed.missing) else missing).append(name)
            continue
        old = new_names[name]
        flaw = _compare(mine, offered[old])
        if not flaw:
            sources[name] = old
        elif _fits(name, allowed.mismatched):
            kept.append(name)
        else:
            mismatched.append(f"{name} ({flaw})")
    ignored = [old for new, old in new_names.items() if new not in wanted]
    unexpected = [old for old in ignored if not _fits(old, allowed.unexpected)]
    if missing or unexpected or mismatched:
        raise CheckpointMismatchError(
            _explain(source, missing, unexpected, mismatched) + _hint(missing, unexpected, rules)
        )
    return Assignment(sources=sources, kept=tuple(kept), ignored=tuple(ignored))


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(
    allowed: Allowed, wanted: Iterable[str], offered: Iterable[str], new_names: Mapping[str, str]
) -> None:
    """A pattern that fits no name is a slip; a difference that is allowed and absent is none."""
    for key, patterns, names in (
        ("allow_missing", allowed.missing, wanted),
        ("allow_mismatched", allowed.mismatched, wanted),
        ("allow_unexpected", allowed.unexpected, offered),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                whose = "source" if key == "allow_unexpected" else "model"
                raise CheckpointMismatchError(
                    f"warm_start.{key}={pattern!r} fits no name of the {whose}; it has {', '.join(list(names)[:5])}"
                )


def _compare(mine: TensorFacts, other: TensorFacts) -> str:
    """Explain what forbids loading ``other`` into ``mine``; empty if nothing does."""
    if mine.shape != other.shape:
        return f"{other.shape} there and {mine.shape} here"
    if not _converts(other.dtype, mine.dtype):
        return f"{other.dtype_name} there and {mine.dtype_name} here"
    return ""


def _converts(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    """Floating point is rounded to the model's format; integers must fit into it, and nothing changes its kind.

    One byte a number is a quantised format, whose scales are elsewhere.
    """
    if source is None or target is None:
        return False
    if source == target:
        return True
    if source.is_floating_point and target.is_floating_point:
        return source.itemsize > 1 and target.itemsize > 1
    if source.is_complex or target.is_complex:
        return source.is_complex and target.is_complex
    if torch.bool in (source, target) or source.is_floating_point or target.is_floating_point:
        return False
    here, there = torch.iinfo(target), torch.iinfo(source)
    return here.min <= there.min and there.max <= here.max


def _explain(source: str, missing: list[str], unexpected: list[str], mismatched: list[str]) -> str:
    parts = [
        f"{len(names)} {what}: {list_some(names, _SHOWN)}"
        for what, names in (
            ("of the model's are missing there", missing),
            ("of the source's are not in the model", unexpected),
            ("do not fit", mismatched),
        )
        if names
    ]
    return (
        f"{source} does not fit the model: {'; '.join(parts)}. Rename with warm_start.rename, or allow it by name with "
        "warm_start.allow_missing, allow_unexpected or allow_mismatched"
    )


def _hint(missing: list[str], unexpected: list[str], rules: Sequence[str]) -> str:
    """A rule that would help, where one prefix is all that differs."""
    if rules or not missing or not unexpected:
        return ""
    prefix, count = _common_prefix(unexpected, set(missing))
    if count * 2 > len(missing):
        return f". {count} names differ by the prefix {prefix!r} alone: warm_start.rename=['^{re.escape(prefix)}=>']"
    prefix, count = _common_prefix(missing, set(unexpected))
    if count * 2 > len(missing):
        return f". {count} names lack the prefix {prefix!r} alone: warm_start.rename=['^=>{prefix}']"
    return ""


def _common_prefix(longer: Iterable[str], shorter: set[str]) -> tuple[str, int]:
    """The prefix, ending in a dot, without which most of the longer names are among the shorter; and how many."""
    found: Counter[str] = Counter()
    for name in longer:
        dots = [match.end() for match in re.finditer("[.]", name)]
        found.update(name[:end] for end in dots if name[end:] in shorter)
    return found.most_common(1)[0] if found else ("", 0)
