"""Randomness as arithmetic: one generator per (seed, epoch, sample id, purpose), on any rank and after any resume."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_UINT64 = (1 << 64) - 1

# What a sample's numbers are drawn for; each purpose has a stream of its own.
TRANSFORM, DECODING = 0, 1


class _Key(ISeedSequence):
    """Passes Philox its key unchanged. A SeedSequence would hash it, and reads system entropy when it is built."""

    __slots__ = ("words",)

    def __init__(self, words: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, np.dtype[Any]]:
        return self.words


def sample_rng(seed: int, epoch: int, sample_id: int, purpose: int = TRANSFORM) -> np.random.Generator:
    """The generator of one sample in one epoch for one purpose: cheap to make, and shares no state with any other.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key (seed, sample id)
    and (purpose, epoch) in the two highest words of its 256-bit counter. So distinct quadruples (modulo 2**64 each)
    have streams that never meet: each owns 2**128 blocks. The values depend on nothing else; numpy keeps Philox's
    stream and the methods of ``Generator`` stable except for announced changes, and the tests pin both.

    ``spawn`` is not available on the generator: draw what is needed from it instead.
    """
    key = np.array((int(seed) & _UINT64, int(sample_id) & _UINT64), np.uint64)
    counter = np.array((0, 0, purpose, int(epoch) & _UINT64), np.uint64)
    # numpy's stubs ask for SeedSequence where any ISeedSequence works.
    return np.random.Generator(np.random.Philox(_Key(key), counter=counter))  # type: ignore[arg-type]
