"""The validated configuration of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...loader.errors import ConfigError
from ...loader.formats.shard import ShardFormat
from ..peers.catalogue import find_peer
from .job import Decode, PeerDecode, PeerLayout, check_run

Environments = Literal["own", "here"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Settings of a benchmark. A run ends after ``epochs`` passes or ``seconds``, whichever is first; None is no limit.

    ``startup`` measures the time to the first batch by itself too, fresh and after a resume in mid-epoch.
    ``conversions`` is the folder or URL that peers' copies of the data are kept in; None chooses one. ``peer_layout``
    "plain" gives peers a record a sample and a field a column, as their manuals do; "packed" groups a table's columns
    into one array a type, and for webdataset also rows into blocks, as an expert would for speed.
    ``environments``: peers run in pinned environments of their "own", which are made, or in the one "here". A run of a
    peer that takes longer than ``timeout_s`` is ended, and the peer is not measured.
    """

    source: str | list[str]
    against: tuple[str, ...] = ()
    batch_size: int = 64
    decode: Decode = "auto"
    peer_decode: PeerDecode = "auto"
    workers: int | None = None
    epochs: int | None = 1
    seconds: float | None = None
    rounds: int = 3
    step_ms: float = 0.0
    startup: bool = True
    cache_dir: str | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict)
    format: ShardFormat | None = None
    conversions: str | None = None
    peer_layout: PeerLayout = "plain"
    environments: Environments = "own"
    trial_s: float = 2.0
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_run(self.batch_size, self.epochs, self.seconds, self.step_ms)  # before any copy is made for peers
        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: must be 1 or more")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be 1 or more")
        for name in self.against:
            find_peer(name)
