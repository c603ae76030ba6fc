"""Numbers of any loader; penstock's has ``metrics``, ``activity`` and ``record_timeline``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....storage.observability.timeline import Timeline

# What a train record takes of the loader's metrics: sums over its steps, and levels of now.
_RECORDED = (
    *("fetched_bytes", "retries", "throttled_requests", "hedges", "cache_hits", "cache_misses"),
    *("evicted_chunks", "refetched_chunks"),
    *("ready_batches", "chunks_in_flight", "resident_bytes"),
)


class LoaderNumbers:
    """Sampled metrics of a loader, for one reader; empty for a loader that has none."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self._before = self.take()

    def take(self) -> Any:
        """Read the loader's metrics, or None if that fails, whatever the error."""
        try:
            found = self.loader.metrics()  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - another's loader, or one that is closed, may not end the run
            return None
        return found if callable(getattr(found, "since", None)) and callable(getattr(found, "to_dict", None)) else None

    def record(self) -> dict[str, Any]:
        """Values of a train record: what the loader did since the last call, and what bounds it."""
        before, now = self._before, self.take()
        self._before = now
        if before is None or now is None:
            return {}
        recent = now.since(before).to_dict()
        values = {f"loader_{name}": recent[name] for name in _RECORDED if name in recent}
        return {"loader_bottleneck": recent.get("bottleneck"), **values}

    def doing(self) -> str:
        """Current wait of the loader, in words; empty for none."""
        try:
            activity = self.loader.activity()  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - as above
            return ""
        return str(activity.get("waiting_for", "")) if isinstance(activity, Mapping) else ""

    def record_timeline(self, timeline: Timeline | None) -> None:
        """Have the loader draw its stages, if it can."""
        try:
            self.loader.record_timeline(timeline)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - as above; the trainer's phases are drawn all the same
            return
