"""Cells of the benchmark's matrix, and the settings that two runs of one report have to share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ...loader.errors import ConfigError
from ...storage.suggestions import did_you_mean
from ..datasets import CASES
from ..harness.config import Environments
from ..peers.catalogue import PEERS, find_peer

StoreName = Literal["local", "s3", "s3-delay", "s3-tls"]
STORES: tuple[StoreName, ...] = get_args(StoreName)
WORKLOADS = tuple(CASES)
QUICK_WORKLOADS = ("bytes-40k", "tokens")
FREE_SETTINGS = ("workloads", "stores", "ranks")  # in which the cells of one report may differ


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One comparison: a workload, from a store, on a number of ranks."""

    workload: str
    store: StoreName
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.workload} · {self.store} · {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """Settings of the field's measurement. A run reads until ``seconds`` after its first batch.

    From S3 it is one pass at most, because a second one would come from peers' copies on the local disk.
    """

    workloads: tuple[str, ...] = WORKLOADS
    stores: tuple[StoreName, ...] = STORES
    ranks: tuple[int, ...] = (1, 2, 4)
    against: tuple[str, ...] = tuple(PEERS)
    scale: float = 1.0
    rounds: int = 5
    seconds: float = 8.0
    trial_s: float = 2.0
    timeout_s: float = 300.0
    delay_ms: float = 20.0
    resume: bool = True
    environments: Environments = "own"
    workers: int | None = None
    """Worker processes of peers that have them; None finds each peer's best number."""
    drop_slower: float | None = None
    """Peers that a round shows to be so many times slower than the best one are left out of those that follow."""

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in CASES:
                raise ConfigError(
                    f"--workloads {name}: unknown; the workloads are {', '.join(CASES)}{did_you_mean(name, CASES)}"
                )
        for name in self.against:
            find_peer(name)
        for store in self.stores:
            if store not in STORES:
                raise ConfigError(f"--stores {store}: unknown; the stores are {', '.join(STORES)}")
        if not (self.workloads and self.stores and self.ranks):
            raise ConfigError("--workloads, --stores and --ranks need at least one name each")
        if min(self.ranks) < 1 or max(self.ranks) > 64:
            raise ConfigError(f"--ranks {','.join(map(str, self.ranks))}: must be from 1 to 64")
        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: must be 1 or more")
        if not 0 < self.scale <= 1000:
            raise ConfigError(f"--scale {self.scale}: must be above 0, and 1000 at most")
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds {self.seconds:g}: must be above 0, and finite")
        if min(self.trial_s, self.timeout_s) <= 0:
            raise ConfigError("trial_s and timeout_s must be above 0")
        if self.drop_slower is not None and not self.drop_slower > 1:
            raise ConfigError(f"--drop-slower {self.drop_slower:g}: must be above 1")
        if not 0 <= self.delay_ms < math.inf:
            raise ConfigError(f"--delay-ms {self.delay_ms}: must be 0 or above, and finite")

    def to_dict(self) -> dict[str, Any]:
        return {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(self).items()}


def quick(config: FieldConfig) -> FieldConfig:
    """The small set that ends in minutes, with what ``config`` says of peers and environments."""
    return FieldConfig(
        workloads=QUICK_WORKLOADS,
        stores=("local",),
        ranks=(1,),
        against=config.against,
        scale=0.25,
        rounds=3,
        seconds=1.0,
        trial_s=0.3,
        timeout_s=120.0,
        resume=False,
        environments=config.environments,
        drop_slower=config.drop_slower,
        workers=0,  # fastest for data this small, of which a pass takes less time than starting workers
    )


def cells_of(config: FieldConfig) -> list[Cell]:
    """The cells, by workload: several ranks, the delay and TLS only for workloads that are measured everywhere."""

    def chosen() -> Iterator[Cell]:
        for workload in config.workloads:
            for store in config.stores:
                for ranks in config.ranks:
                    more = (store in ("s3-delay", "s3-tls")) + (ranks != 1)
                    if more == 0 or (more == 1 and CASES[workload].everywhere):
                        yield Cell(workload=workload, store=store, ranks=ranks)

    return list(chosen())


def other_settings(before: dict[str, Any], config: FieldConfig) -> list[str]:
    """Reasons why an earlier run's cells cannot stand beside this one's: which settings differ."""
    now = config.to_dict()
    return [
        f"{name} {before.get(name)} and now {now[name]}"
        for name in now
        if name not in FREE_SETTINGS and before.get(name) != now[name]
    ]
