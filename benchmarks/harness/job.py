"""One measurement as a message: what to run in a fresh process, and what it returns."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ...loader.errors import ConfigError

Decode = Literal["none", "auto", "224"]
PeerDecode = Literal["auto", "pil", "opencv", "penstock"]
PeerLayout = Literal["plain", "packed"]
Mode = Literal["epoch", "first-batch", "check"]


def check_run(batch_size: int, epochs: int | None, seconds: float | None, step_ms: float) -> None:
    """Raise ConfigError where no run has these settings, of ``Job`` and of ``BenchConfig``."""
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be 1 or more")
    if epochs is None and seconds is None:
        raise ConfigError("a run needs an end: give epochs or seconds")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs={epochs}: must be 1 or more")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: must be above 0, and finite")
    if not 0 <= step_ms < math.inf:
        raise ConfigError(f"step_ms={step_ms}: must be 0 or above, and finite")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of one measuring process. Sent on its standard input, since storage options may hold credentials.

    ``mode``: "epoch" reads until ``epochs`` passes or ``seconds`` are over, whichever is first; "first-batch" stops
    after one batch; "check" reads one pass and sums up its content. ``state`` is a position to resume from. ``fields``
    is the layout of a sample; ``shape`` says how the peer's conversion was laid out, and is the peer's own affair.
    ``scratch`` is an empty folder of this job alone. ``device``: where batches will be used; ours go there themselves,
    peers are asked to pin them. ``rank`` of ``world_size`` reads its share of the data, beside the others; ``workers``
    are each rank's. ``source_format`` is the format of the data set's own shards, for the bare loop.
    """

    contender: str
    url: str | list[str]
    num_samples: int
    scratch: str
    mode: Mode = "epoch"
    storage_options: dict[str, str] = field(default_factory=dict)
    format: str | None = None
    format_config: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    decode: Decode = "auto"
    peer_decode: PeerDecode = "auto"
    workers: int = 1
    epochs: int | None = 1
    seconds: float | None = None
    step_ms: float = 0.0
    cache_dir: str | None = None
    device: str | None = None
    state: Any = None
    fields: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    source_format: str = ""
    python: str | None = None
    """The interpreter to run it with; None is the running one."""
    modules: list[str] = field(default_factory=list)
    """What the contender is known to import while it runs; imported before the clock starts, as all its imports are."""

    def __post_init__(self) -> None:
        check_run(self.batch_size, self.epochs, self.seconds, self.step_ms)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass of a run: what it delivered, and when it began and ended, in seconds after the loader was asked for.

    ``cpu_s`` is the CPU time of the whole process tree from then on until the pass ended.
    """

    samples: int
    start_s: float
    stop_s: float
    complete: bool
    cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of one run, of one rank or of all together.

    ``samples_per_s`` and ``mb_per_s`` (10^6 bytes of payload) count from the first batch on, so that nobody's start-up
    is in them; ``first_batch_s`` is that start-up: from making the loader, imports done, to its first batch. Waits are
    per batch, the first excluded. ``cpu_s`` is of the whole process tree, user and system; so is
    ``first_batch_cpu_s``, until the first batch. ``peak_bytes`` is the
    largest proportional set size of the tree, anonymous and shared memory, sampled; mapped files are not in it.
    ``peak_rss_bytes`` is the sum of the processes' own peaks of resident memory (VmHWM), mapped files included.
    """

    contender: str
    mode: Mode
    samples: int
    payload_bytes: int
    batches: int
    seconds: float
    samples_per_s: float
    mb_per_s: float
    first_batch_s: float
    wait_p50_ms: float
    wait_p99_ms: float
    wait_share: float
    cpu_s: float
    first_batch_cpu_s: float = 0.0
    peak_bytes: int = 0
    peak_rss_bytes: int = 0
    passes: list[Pass] = field(default_factory=list)
    version: str | None = None
    checksum: str | None = None
    bottleneck: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    late_modules: list[str] = field(default_factory=list)
    """What was imported while the clock ran."""

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Measurement:
        return Measurement(**values | {"passes": [Pass(**each) for each in values.get("passes", ())]})
