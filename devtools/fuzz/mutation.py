"""Damages valid inputs: bits, numbers, ranges, words and whole ends, several at a time, by a seeded generator."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Literal

MOST_BYTES = 1 << 16
_NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
_TEXTS = (
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"99999999999",
    b"9" * 40,
    b"9" * 5000,
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"1.5",
)
_DIGITS = re.compile(rb"\d+")

Repair = Callable[[bytearray], None]


class Mutator:
    """Makes one damaged input after another out of ``seeds``; ``words`` are put in where they may mean something.

    ``repair`` mends checksums in place, which would reveal any damage at once; half of the inputs are repaired.
    """

    def __init__(self, seeds: Sequence[bytes], seed: int, words: Sequence[bytes] = (), repair: Repair | None = None):
        self._seeds = seeds
        self._random = random.Random(seed)
        self._words = [*words, *_TEXTS]
        self._repair = repair

    def next(self) -> bytes:
        """Make the next input, of MOST_BYTES or less."""
        draw = self._random
        data = bytearray(draw.choice(self._seeds))
        for _ in range(1 << draw.randrange(4)):
            draw.choice(_STEPS)(self, data)
        del data[MOST_BYTES:]
        if self._repair is not None and draw.random() < 0.5:
            self._repair(data)
        return bytes(data)

    def _at(self, data: bytearray, width: int = 1) -> int:
        """Choose a place; often near an end, where headers and footers are."""
        last = max(0, len(data) - width)
        kind = self._random.random()
        if kind < 0.2:
            return self._random.randint(0, min(last, 128))
        return self._random.randint(max(0, last - 1024), last) if kind < 0.4 else self._random.randint(0, last)

    def _range(self, data: bytearray) -> tuple[int, int]:
        start = self._at(data)
        return start, min(len(data), start + self._random.choice((1, 2, 4, 8, 16, 64, 512, 4096)))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._at(data)] ^= 1 << self._random.randrange(8)

    def _set_byte(self, data: bytearray) -> None:
        if data:
            data[self._at(data)] = self._random.randrange(256)

    def _set_number(self, data: bytearray) -> None:
        width = self._random.choice((1, 2, 4, 8))
        at = self._at(data, width)
        number = self._random.choice((*_NUMBERS, len(data), len(data) - at, at))
        data[at : at + width] = (number & (1 << 8 * width) - 1).to_bytes(width, self._random.choice(("little", "big")))

    def _add(self, data: bytearray) -> None:
        width = self._random.choice((1, 2, 4, 8))
        at = self._at(data, width)
        order: Literal["little", "big"] = "little" if self._random.random() < 0.5 else "big"
        number = int.from_bytes(data[at : at + width], order) + self._random.randint(-16, 16)
        data[at : at + width] = (number & (1 << 8 * width) - 1).to_bytes(width, order)

    def _delete(self, data: bytearray) -> None:
        start, stop = self._range(data)
        del data[start:stop]

    def _repeat(self, data: bytearray) -> None:
        start, stop = self._range(data)
        data[stop:stop] = data[start:stop] * self._random.choice((1, 1, 1, 3, 100))

    def _copy(self, data: bytearray) -> None:
        start, stop = self._range(data)
        at = self._at(data, stop - start)
        data[at : at + stop - start] = data[start:stop]

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self._random.randbytes(self._random.choice((1, 2, 4, 16, 64)))

    def _put_word(self, data: bytearray) -> None:
        word = self._random.choice(self._words)
        at = self._at(data, len(word))
        data[at : at + (0 if self._random.random() < 0.5 else len(word))] = word

    def _change_digits(self, data: bytearray) -> None:
        found = list(_DIGITS.finditer(data))
        if found:
            match = self._random.choice(found)
            start, stop = match.span()
            text = self._random.choice((*_TEXTS, str(self._random.choice(_NUMBERS)).encode()))
            data[start:stop] = text

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _splice(self, data: bytearray) -> None:
        other = self._random.choice(self._seeds)
        at = self._at(data)
        data[at:] = other[at if self._random.random() < 0.5 else self._random.randint(0, len(other)) :]


_STEPS = (
    *(Mutator._flip, Mutator._set_byte, Mutator._set_number, Mutator._add) * 3,
    *(Mutator._delete, Mutator._repeat, Mutator._copy, Mutator._insert, Mutator._put_word, Mutator._change_digits) * 2,
    Mutator._cut,
    Mutator._splice,
)
