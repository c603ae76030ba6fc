"""Random numbers by counting: number i of a stream is a hash of its key and i. There is no state to keep or restore."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
UIntArray = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_TILE = 8192  # numbers that a core's cache holds, with all that is made of them
# Sizes that are sorted faster by counting: below them setup dominates, above them the sort of what counting leaves.
_COUNTED = range(1 << 11, 1 << 21)
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Uses of streams of random numbers, each the first word of its keys, so that no two share a stream. Orders and what
# replaces bad samples follow from them for ever. RUNS and SOURCES have one number, and keys of unlike lengths.
FOR_CHUNKS, FOR_WINDOWS, FOR_SUBSETS, FOR_CHUNK_DRAWS, FOR_ROW_DRAWS, FOR_RUNS = 1, 2, 3, 4, 5, 6
FOR_SOURCES, FOR_NEAR, FOR_FAR, FOR_ROWS = 6, 7, 8, 9


def mix64(values: UIntArray) -> UIntArray:
    """A bijection of uint64 that looks random: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(_FACTORS[0])
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_FACTORS[1])
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stream_key(*words: int) -> int:
    """One uint64 key from several integers; distinct words give unrelated keys."""
    key = 0
    for word in words:
        key = _mix_one((key + _GOLDEN + int(word)) & _MASK)
    return key


def _mix_one(value: int) -> int:
    """``mix64`` of one number, in a tenth of the time that an array of one takes."""
    value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
    value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
    return value ^ (value >> 31)


def random_numbers(start: int, stop: int, key: int) -> UIntArray:
    """Numbers ``start`` to ``stop`` of a stream, (stop - start,) uint64; no two numbers of one stream are equal."""
    return _hash(np.arange(start + 1, stop + 1, dtype=np.uint64), key)


def random_numbers_at(places: IntArray, key: int) -> UIntArray:
    """The numbers of a stream at ``places`` from 0 on, in any order: the same shape, uint64."""
    return _hash(places.astype(np.uint64) + np.uint64(1), key)


def _hash(numbers: UIntArray, key: int) -> UIntArray:
    numbers *= np.uint64(_GOLDEN)
    numbers += np.uint64(key)
    return mix64(numbers)


def permutation(size: int, key: int) -> IntArray:
    """A pseudorandom permutation of range(size), (size,) int64: the order of ``size`` random numbers.

    Each number carries its index in its lowest bits. So all are distinct, every sorting algorithm of every numpy yields
    the same permutation, and values are sorted instead of indexes, which is several times faster.
    """
    index_bits = np.uint64(max(1, (size - 1).bit_length()))
    numbers = np.empty(size, np.uint64)
    for start in range(0, size, _TILE):
        stop = min(size, start + _TILE)
        tile = random_numbers(start, stop, key)
        tile >>= index_bits
        tile <<= index_bits
        tile |= np.arange(start, stop, dtype=np.uint64)
        numbers[start:stop] = tile
    ordered = _sort(numbers)
    ordered &= (np.uint64(1) << index_bits) - np.uint64(1)
    return ordered.view(np.int64)


def _sort(numbers: UIntArray) -> UIntArray:
    """Random numbers in ascending order; those that are given may be sorted, too.

    numpy sorts 16 bits by counting. By its highest 16 each number comes to within a few places of where it belongs, and
    a stable sort of numbers that are nearly in order takes little more than a look at each.
    """
    if len(numbers) not in _COUNTED:
        numbers.sort()
        return numbers
    near = numbers[np.argsort((numbers >> np.uint64(48)).astype(np.uint16), kind="stable")]
    near.sort(kind="stable")
    return near


# What a sample's numbers are drawn for; each purpose has a stream of its own.
TRANSFORM, DECODING = 0, 1


class _Key:
    """Passes Philox its key unchanged. A SeedSequence would hash it, and reads system entropy when it is built."""

    __slots__ = ("words",)

    def __init__(self, words: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, np.dtype[Any]]:
        return self.words


@cache
def _key_type() -> type[_Key]:
    # numpy.random takes some ms to import, and few loaders draw numbers for their samples.
    np.random.bit_generator.ISeedSequence.register(_Key)
    return _Key


def sample_rng(seed: int, epoch: int, sample_id: int, purpose: int = TRANSFORM) -> np.random.Generator:
    """The generator of one sample in one epoch for one purpose: cheap to make, and shares no state with any other.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (seed, sample id)
    and (purpose, epoch) in the two highest words of its 256-bit counter. So distinct quadruples (modulo 2**64 each)
    have streams that never meet: each owns 2**128 blocks. The values depend on nothing else; numpy keeps Philox's
    stream and the methods of ``Generator`` stable except for announced changes, and the tests pin both.

    ``spawn`` is not available on the generator: draw what is needed from it instead.
    """
    key = np.array((int(seed) & _MASK, int(sample_id) & _MASK), np.uint64)
    counter = np.array((0, 0, purpose, int(epoch) & _MASK), np.uint64)
    # numpy's stubs ask for SeedSequence where any ISeedSequence works.
    return np.random.Generator(np.random.Philox(_key_type()(key), counter=counter))  # type: ignore[arg-type]
