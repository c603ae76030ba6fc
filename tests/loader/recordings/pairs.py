"""The errors of a loader, a mixture and a source for each pair of their arguments' values."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choices import FAMILIES, Family, Places

ACCEPTED = "accepted"
Key = tuple[str, str]  # an argument, and the name of one of its values


@dataclass
class Bench:
    """Opens loaders over one folder of data, each with a fresh folder of its own."""

    data: Path
    scratch: Path
    count: int = 0

    def try_out(self, family: Family, keys: Sequence[Key]) -> str:
        """``ACCEPTED``, or the error's type and text, or a warning's."""
        self.count += 1
        places = Places(self.data, self.scratch / str(self.count))
        options = {argument: family.choices[argument][name] for argument, name in keys}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                family.open(places, options).close()
        except Exception as exc:  # noqa: BLE001 - each is recorded
            notes = "".join(f" [{note}]" for note in getattr(exc, "__notes__", ()))
            return normalise(f"{type(exc).__name__}: {exc}{notes}", places)
        return ACCEPTED


def normalise(text: str, places: Places) -> str:
    """The text without what differs from run to run."""
    text = text.replace(str(places.fresh), "FRESH").replace(str(places.data), "DATA")
    text = text.replace(str(Path.cwd()), "HERE")
    return re.sub(r"\b0x[0-9a-f]+", "ADDRESS", text)


def keys_of(family: Family) -> list[Key]:
    return [(argument, name) for argument, values in family.choices.items() for name in values]


def pairs_of(family: Family) -> Iterator[tuple[Key, Key]]:
    """All pairs of values of two arguments."""
    return (pair for pair in itertools.combinations(keys_of(family), 2) if pair[0][0] != pair[1][0])


def some_pairs(family: Family, seed: int) -> list[tuple[Key, Key]]:
    """A fortieth of the pairs."""
    pairs = list(pairs_of(family))
    return random.Random(seed).sample(pairs, len(pairs) // 40)


@dataclass(frozen=True)
class Recording:
    """The outcomes of each value alone and of each pair.

    ``alone`` is by value; ``pairs`` has a line for each value, with a letter for each value of a later argument: ".",
    the pair is accepted; "<", it gives what the first gives alone; ">", what the second gives; "*", a text of its own,
    whose number in ``texts`` is in ``others``, by both values.
    """

    texts: Sequence[str]
    alone: Mapping[str, int]
    pairs: Mapping[str, str]
    others: Mapping[str, Mapping[str, int]]

    def of_one(self, key: Key) -> str:
        return self.texts[self.alone[name_of(key)]]

    def of_pair(self, pair: tuple[Key, Key], place: int) -> str:
        """The outcome of a pair, the ``place``-th of those that begin with its first value."""
        first, second = pair
        letter = self.pairs[name_of(first)][place]
        if letter == "*":
            return self.texts[self.others[name_of(first)][name_of(second)]]
        return ACCEPTED if letter == "." else self.of_one(first if letter == "<" else second)


def name_of(key: Key) -> str:
    return "=".join(key)


def record(bench: Bench, family: Family) -> dict[str, Any]:
    """What ``Recording`` holds, as JSON."""
    texts = [ACCEPTED]
    alone = {key: bench.try_out(family, [key]) for key in keys_of(family)}
    found = {pair: bench.try_out(family, pair) for pair in pairs_of(family)}

    def number(text: str) -> int:
        if text not in texts:
            texts.append(text)
        return texts.index(text)

    numbers = {name_of(key): number(text) for key, text in alone.items()}
    letters: dict[str, str] = {}
    others: dict[str, dict[str, int]] = {}
    for (first, second), text in found.items():
        if text == ACCEPTED:
            letter = "."
        elif text in (alone[first], alone[second]):
            letter = "<" if text == alone[first] else ">"
        else:
            letter = "*"
            others.setdefault(name_of(first), {})[name_of(second)] = number(text)
        letters[name_of(first)] = letters.get(name_of(first), "") + letter
    return {"texts": texts, "alone": numbers, "pairs": letters, "others": others}


def differences(
    bench: Bench, family: Family, recording: Recording, pairs: Iterable[tuple[Key, Key]]
) -> Iterator[tuple[str, str, str]]:
    """The pairs that now give something else: which, what was recorded and what is."""
    places: dict[tuple[Key, Key], int] = {}
    for _, group in itertools.groupby(pairs_of(family), key=lambda pair: pair[0]):
        places |= {pair: place for place, pair in enumerate(group)}
    for pair in pairs:
        recorded, now = recording.of_pair(pair, places[pair]), bench.try_out(family, pair)
        if recorded != now:
            yield " ".join(map(name_of, pair)), recorded, now


__all__ = ["FAMILIES", "Bench", "Recording", "differences", "keys_of", "pairs_of", "record", "some_pairs"]
