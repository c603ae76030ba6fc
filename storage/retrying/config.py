"""Settings and counts of retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """Limits on the time, number and concurrency of tries.

    ``deadline_s`` covers a call with all its tries. A try is broken off after ``idle_timeout_s`` without a byte, or
    when the whole response comes at less than ``min_bytes_per_s``: after 12 s for up to 4 MiB, 24 s for up to 16 MiB,
    and so on in doublings. The next try gets twice the time, and so does every try while a whole host is slow. A
    try that begins within the deadline may end after it. Calls that last longer than ``warn_after_s`` are logged as
    warnings.

    A second request is sent when the first takes three times the 95th percentile of its size's latencies and at least
    ``hedge_floor_s``, or a quarter of its time where no latencies are known. ``hedge_share`` limits second requests
    that do not win to a share of all requests; 0 turns them off.
    """

    deadline_s: float = 120.0
    idle_timeout_s: float = 8.0
    min_bytes_per_s: float = float(1 << 20)
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    max_running: int = 64
    hedge_share: float = 0.05
    hedge_floor_s: float = 0.02
    warn_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.deadline_s < 0 or not 0 <= self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"{self}: needs deadline_s >= 0 and 0 <= first_delay_s <= max_delay_s")
        if not self.idle_timeout_s > 0 or not self.min_bytes_per_s > 0 or self.warn_after_s < 0:
            raise ValueError(f"{self}: needs idle_timeout_s > 0, min_bytes_per_s > 0 and warn_after_s >= 0")
        if self.max_running < 1 or not 0 <= self.hedge_share <= 1 or self.hedge_floor_s < 0:
            raise ValueError(f"{self}: needs max_running >= 1, hedge_share in [0, 1] and hedge_floor_s >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryCounts:
    """Requests, and what was done beyond one request per call, since the store was opened."""

    requests: int
    retries: int
    throttled: int
    hedges: int
    hedges_won: int
