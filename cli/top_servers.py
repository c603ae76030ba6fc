"""View of ``penstock top`` for a run over a parameter server: its shards, its workers, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..trainer.report.status.servers import FINAL, ServersStatus, ShardStatus, WorkerStatus
from .screen import format_bytes, format_count, shown, wrapped

_STALE_PERIODS, _STALE_S = 3.0, 5.0


@dataclass(frozen=True, kw_only=True)
class ServersView:
    """A moment of such a run, read at ``now`` by the reader's clock."""

    name: str
    status: ServersStatus
    now: float

    @property
    def state(self) -> str:
        """The reason why it does not train, in words; empty while it does."""
        one = self.status
        saved = "" if one.saved_step is None else f" The last save is of step {one.saved_step:,}."
        if one.state == "failed":
            return f"The run failed: {one.error.rstrip(' .')}.{saved}"
        if one.state == "stopped":
            return f"The run was stopped after step {one.step:,}.{saved}"
        if one.state == "ended":
            return "The run has ended."
        silent_s = self.now - one.time
        if silent_s > max(_STALE_S, _STALE_PERIODS * one.every_s):
            return f"Its driver has been silent for {silent_s:.0f} s: it was killed, or hangs.{saved}"
        return ""

    @property
    def is_over(self) -> bool:
        """Return whether there will be no other view of this run."""
        return self.status.state in FINAL

    def render(self, width: int) -> Iterator[RenderableType]:
        """The view, at most so wide."""
        for line in wrapped(shown(self._head()), width):
            yield Text(line, style="bold")
        if self.status.shards:
            yield Text("")
            yield _shard_table(self.status.shards)
        if self.status.workers:
            yield Text("")
            yield _worker_table(self.status.workers)
        remarks = [*([self.state] if self.state else []), *self._advice()]
        if remarks:
            yield Text("")
        for remark in remarks:
            for line in wrapped(shown(remark), width):
                yield Text(line, style="yellow")

    def _head(self) -> str:
        one = self.status
        parts = [self.name]
        parts.append(f"step {one.step:,}" + (f" of {one.total_steps:,}" if one.total_steps else ""))
        parts.append(f"epoch {one.epoch}")
        parts.append(f"{format_count(len(one.workers), 'worker')} over {format_count(len(one.shards), 'shard')}")
        if one.policy:
            parts.append(one.policy)
        parts += [f"{name} {value:.4g}" for name, value in one.metrics.items()]
        return "   ".join(parts)

    def _advice(self) -> Iterator[str]:
        if self.state:
            return
        for shard in self.status.shards:
            if not shard.is_answering:
                yield f"{shard.name} gives no answer: it starts anew, or is busy."
        waiting = [one for one in self.status.workers if one.waits_for]
        for name in sorted({name for one in waiting for name in one.waits_for}):
            count = sum(name in one.waits_for for one in waiting)
            yield (
                f"{format_count(count, 'worker')} wait{'s' if count == 1 else ''} for {name}, the slowest: a policy "
                "with a larger staleness, or asp, lets them go on."
            )


def _shard_table(shards: Sequence[ShardStatus]) -> Table:
    table = _table(
        ("shard", "version", "values", "rows", "requests", "bytes in", "bytes out", "starts", "share", "MB/s")
    )
    for one in shards:
        table.add_row(
            shown(one.name),
            f"{one.version:,}",
            f"{one.values:,}",
            f"{one.rows:,}",
            f"{one.requests:,}",
            format_bytes(one.bytes_in),
            format_bytes(one.bytes_out),
            f"{one.starts}",
            f"{one.share:.0%}",
            "" if one.mb_per_s is None else f"{one.mb_per_s:.3g}",
        )
    return table


def _worker_table(workers: Sequence[WorkerStatus]) -> Table:
    table = _table(("worker", "clock", "behind", "leases", "silent", "starts", "waits for"))
    for one in workers:
        table.add_row(
            shown(one.name),
            "" if one.clock is None else f"{one.clock:,}",
            f"{one.behind}",
            f"{one.leases}",
            f"{one.silent_s:.0f} s",
            f"{one.starts}",
            shown(", ".join(one.waits_for)),
        )
    return table


def _table(titles: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 or title == "waits for" else "right", no_wrap=True)
    return table
