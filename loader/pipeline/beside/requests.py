"""The messages between the training process and the loader's process, but for the batches."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...ranks.channel import ChannelAddress
    from ...reading.bad.chunks import BadChunk
    from ...reading.bad.samples import BadNews
    from ..tuning import PipelineOptions

# Messages beside the calls: the kind, the numbers of the pipeline and of a slot, its size, and how much of it is used.
MESSAGE = struct.Struct("<5q")
# Of a BROKEN one, which no slot could hold, the next message has the pickled failure.
NEW, FREE, GONE, BATCH, FAILED, BROKEN = range(6)
MOST_BROKEN_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The name of what is to be delivered: batches from ``position`` of ``epoch`` on, of a share of an order.

    It says all that decides them, and nothing of who asks or of what came before, so that any process may answer it:
    the data set's fingerprint, the ``order`` as a loader's state has it, the rank's share of global batches, and
    ``work``, a digest of what decodes and transforms.
    """

    fingerprint: str
    order: Mapping[str, Any]
    epoch: int
    position: int
    rank: int
    world_size: int
    global_batch_size: int
    weights: Sequence[float] | None
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Facts that a new process lacks: what is bad, by source, and where ranks share what their lanes yield."""

    bad: Sequence[BadNews]
    bad_chunks: Sequence[BadChunk]
    channel: ChannelAddress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Begin pipeline number ``generation``, with ``slots`` to fill; ``is_traced``: its spans are wanted."""

    generation: int
    request: Request
    known: Known
    options: PipelineOptions
    slots: Sequence[int]
    is_traced: bool


@dataclass(frozen=True, slots=True)
class End:
    """End the pipeline, if one runs, and answer with the news of its deliveries but the first ``received``."""

    received: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Record what threads do from now on, or answer with the spans since that was asked for."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that was given in the loader's process."""

    warning: bytes
    path: str
    line: int


@dataclass(frozen=True, slots=True)
class News:
    """News that a delivery or failure brings beside itself: warnings, and what was found to be bad since the last one.

    ``bad`` is by source; ``bad_chunks`` are all so far. ``packed`` counts what is packed in the delivery: in all, and
    by source of a mixture.
    """

    warned: Sequence[Warned]
    bad: Sequence[BadNews]
    bad_chunks: Sequence[BadChunk]
    packed: Sequence[Mapping[str, int]]
