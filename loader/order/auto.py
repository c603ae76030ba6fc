"""The order of a new run where it is not given, from the data set and the world size alone, so that all ranks agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from .plan import Order, next_power_of_two

if TYPE_CHECKING:
    from .permutation import IntArray

Choice = int | Literal["auto"]

_MANY_CHUNKS_A_LANE = 4  # from here on a permutation of chunks mixes well by itself
_HELD_BYTES = 64 << 20  # a data set that any rank may hold whole
_MOST_PIECES = 1 << 20  # bounds the memory of an order: 8 bytes a piece in each of three arrays
_WINDOW_ROWS = 4096


def choose_order(
    *,
    seed: int,
    shuffle: bool,
    lanes: Choice,
    window: Choice,
    piece: Choice,
    world_size: int,
    chunk_samples: IntArray,
    chunk_memory: IntArray,
    held_bytes: int = 0,
) -> Order:
    """The order with all that is "auto" chosen, for chunks of these samples and bytes once opened: (chunks,) each.

    ``held_bytes``: what other data sets take that are read beside this one, and would be held whole if this were.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
    """
    if lanes == "auto":
        lanes = auto_lanes(shuffle=shuffle, world_size=world_size)
    order = Order(seed=seed, shuffle=shuffle, lanes=lanes)
    if piece == "auto":
        piece = auto_piece(
            shuffle=order.shuffle,
            lanes=order.lanes,
            num_chunks=len(chunk_samples),
            num_samples=int(chunk_samples.sum()),
            memory_bytes=int(chunk_memory.sum()) + held_bytes,
        )
    order = replace(order, piece=piece)
    if window == "auto":
        window = auto_window(lanes=order.lanes, mean_chunk_bytes=float(chunk_memory.mean()), piece=order.piece)
    return replace(order, window=window)


def auto_lanes(*, shuffle: bool, world_size: int) -> int:
    """Lanes for a new run: 1 for one rank without shuffle, otherwise enough for four times the current ranks."""
    return 1 if not shuffle and world_size == 1 else max(16, next_power_of_two(4 * world_size))


def auto_piece(*, shuffle: bool, lanes: int, num_chunks: int, num_samples: int, memory_bytes: int) -> int:
    """The piece for a new run, 0 for whole chunks: ranges of rows where chunks are few and a rank may hold them all.

    ``memory_bytes`` is what the data set takes once opened.
    """
    is_held = num_chunks == 1 or memory_bytes <= _HELD_BYTES
    if not shuffle or num_chunks >= _MANY_CHUNKS_A_LANE * lanes or not is_held:
        return 0
    return -(-num_samples // _MOST_PIECES)


def auto_window(
    *, lanes: int, mean_chunk_bytes: float, piece: int = 0, pool_chunks: int = 64, lane_bytes: int = 64 << 20
) -> int:
    """Pieces to mix in a lane.

    Whole chunks: enough for all lanes together to mix about ``pool_chunks``, within about ``lane_bytes`` a lane. Ranges
    of rows, which the permutation has mixed already: as many as are worth planning at once.
    """
    if piece:
        return max(1, _WINDOW_ROWS // piece)
    by_mixing = max(2, pool_chunks // lanes)
    by_memory = int(lane_bytes // max(1.0, mean_chunk_bytes))
    return max(1, min(by_mixing, by_memory, 8))
