"""Weights by which samples are drawn more often than others: one a sample, or one for all samples of a chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..cached import cached_property

_LARGEST = 1 << 30  # the largest weight as a whole number: sums of 2**33 of them are exact in int64
_MOST_SAMPLES = 1 << 33


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Whole numbers in proportion to what was given, the largest 2**30: ``values`` is (samples,) or (chunks,) int32."""

    values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    by_chunk: bool = False

    @staticmethod
    def read(given: Sequence[float] | np.ndarray[Any, Any], *, by_chunk: bool = False) -> Weights:
        """Round weights to multiples of 2**-30 of the largest.

        Raises:
            ConfigError: they are not positive, finite numbers in one dimension, or one is too small beside the largest.
        """
        try:
            weights = np.asarray(given, np.float64)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"weights={type(given).__name__}: not numbers, one a sample ({exc})") from exc
        if weights.ndim != 1 or not len(weights):
            raise ConfigError(f"weights of shape {weights.shape}: needs one dimension, one weight a sample")
        bad = np.flatnonzero(~((weights > 0) & (weights < np.inf)))
        if len(bad):
            raise ConfigError(
                f"weights[{bad[0]}]={weights[bad[0]]} ({len(bad):,} such): weights are positive, finite numbers; leave "
                "samples out with subset=, or by naming other shards"
            )
        values = np.rint(weights / weights.max() * _LARGEST).astype(np.int32)
        if not values.all():
            least = int(weights.argmin())
            raise ConfigError(
                f"weights[{least}]={weights[least]} is below a billionth of the largest, {weights.max()}; raise it"
            )
        return Weights(values=values, by_chunk=by_chunk)

    def check(self, num_samples: int, num_chunks: int) -> None:
        """Raise ConfigError unless there is one weight a sample (or chunk) of a data set of this size."""
        needed = num_chunks if self.by_chunk else num_samples
        if len(self.values) != needed:
            raise ConfigError(
                f"weights: {len(self.values):,} of them for {needed:,} samples; give one a sample id of the whole data "
                "set (also with subset=), or a mapping from patterns of shard names to weights"
            )
        if num_samples > _MOST_SAMPLES:
            raise ConfigError(f"weights: at most {_MOST_SAMPLES:,} samples can be weighted, not {num_samples:,}")

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the weights, for states."""
        data = self.values.astype("<i4").tobytes()
        return hashlib.blake2b(bytes([self.by_chunk]) + data, digest_size=8).hexdigest()
