"""View of ``penstock top``: a line on the run, a row a rank, and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..storage.suggestions import list_some
from ..trainer.report.status.rank_status import RankStatus
from ..trainer.report.status.survey import Survey
from .rank_pictures import LEAST_WIDTH, MOST_WIDTH, list_pictures
from .screen import format_bytes, format_count, shown, wrapped

_GAP = 2
_BESIDE_PICTURES = 2.0  # columns that are kept less give way to pictures
_SPACE = "\u00a0"  # inside what must stay on one line


@dataclass(frozen=True, kw_only=True)
class View:
    """Moment of a run; ``state`` explains why no rank trains, and is empty while one does.

    ``rates`` are those of the moments before, by rank: samples per second, or steps where no samples are counted.
    """

    name: str
    ranks: Sequence[RankStatus]
    survey: Survey
    last: Mapping[str, Any] | None
    state: str
    rates: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def render(self, width: int, rows: int | None = None) -> Iterator[RenderableType]:
        """The view, at most so wide; of more than ``rows`` ranks those that need attention most."""
        yield from _lines(_head(self), width, "bold")
        if self.ranks:
            yield Text("")
            shown_ranks = sorted(self.ranks, key=lambda one: (_urgency(one, self.survey), one.rank))[:rows]
            yield from _table(sorted(shown_ranks, key=lambda one: one.rank), self, width)
            if len(shown_ranks) < len(self.ranks):
                yield Text(f"and {len(self.ranks) - len(shown_ranks)} more ranks", style="dim")
        remarks = list(_remarks(self))
        if remarks:
            yield Text("")
        for text, style in remarks:
            yield from _lines(text, width, style)


def show_view(screen: Console, view: View) -> None:
    for part in view.render(screen.width):
        screen.print(part)


def _lines(text: str, width: int, style: str) -> Iterator[Text]:
    for line in wrapped(shown(text), width):
        yield Text(line.replace(_SPACE, " "), style=style)


def _head(view: View) -> str:
    """``runs/mine   step 120 of 500   epoch 1   1,532 samples/s   loss 0.321   ETA 0:01:10``."""
    steps = max((one.step for one in view.ranks), default=None)
    last = view.last or {}
    step = steps if steps is not None else last.get("step")
    total = next((one.total_steps for one in view.ranks if one.total_steps), None)
    parts = [view.name]
    if step is not None:
        parts.append(f"step {step:,}{f' of {total:,}' if total else ''}")
    if view.ranks:
        parts.append(f"{format_count(max(one.epoch for one in view.ranks), 'epoch')} done")
        hosts = len({one.host for one in view.ranks})
        parts.append(format_count(view.survey.world_size, "rank") + (f" on {hosts} hosts" if hosts > 1 else ""))
    if view.survey.step_s:
        rates = [one.samples_per_s for one in view.ranks if one.rank not in view.survey.stale]
        rate = sum(one for one in rates if one is not None) / max([1, *(one.replica_ranks for one in view.ranks)])
        if rate and not view.survey.missing:
            parts.append(f"{rate:,.0f} samples/s")
        parts.append(f"{_seconds(view.survey.step_s)} a step")
    loss, eta_s = last.get("loss"), last.get("eta_s")
    if isinstance(loss, (int, float)):
        parts.append(f"loss {loss:.4g}")
    if isinstance(eta_s, (int, float)) and abs(eta_s) < math.inf and not view.state:
        parts.append(f"ETA {int(eta_s) // 3600}:{int(eta_s) // 60 % 60:02d}:{int(eta_s) % 60:02d}")
    return "   ".join(part.replace(" ", _SPACE) for part in parts)


Cell = Callable[[RankStatus], str]


@dataclass(frozen=True)
class _Column:
    """``keep``: the higher, the later it gives way to a narrow terminal. A title may have two lines."""

    title: str
    cell: Cell
    keep: float
    justify: str = "right"

    def width(self, ranks: Sequence[RankStatus]) -> int:
        return max(map(len, (*self.title.split("\n"), *(self.cell(one) for one in ranks))))


_BOUND = {
    "consumer": "training",
    "open": "opening chunks",
    "assemble": "gathering rows",
    "decode": "decoding",
    "copy": "copying to device",
}


def _traffic(name: str, one: RankStatus) -> str:
    return _bytes(one.traffic.get(name))


def _columns(view: View) -> list[_Column]:
    """The columns that have something to tell of this run."""
    ranks = view.ranks
    found = [_Column("rank", lambda one: str(one.rank), 99)]
    if any(one.place for one in ranks):
        found.append(_Column("place", lambda one: shown(one.place)[:24], 97, "left"))
    if len({one.host for one in ranks}) > 1:
        found.append(_Column("host", lambda one: shown(one.host)[:16], 3, "left"))
    found.append(_Column("doing", lambda one: _doing(one, view.survey), 98, "left"))
    if any(one.samples_per_s is not None for one in ranks):
        found.append(_Column("samples/s", lambda one: _number(one.samples_per_s), 9))
    else:
        found.append(_Column("steps/s", lambda one: f"{one.steps_per_s:.3g}", 9))
    found.append(_Column("waits\non data", lambda one: _share(one.data_wait_share), 10))
    if view.survey.waits:
        found.append(_Column("waits\non ranks", lambda one: _share(view.survey.waits.get(one.rank)), 6))
    if any(one.recent for one in ranks):
        found.append(_Column("batches\nready", lambda one: str(one.recent.get("ready_batches", "")), 5))
        found.append(
            _Column("limited by", lambda one: shown(_BOUND.get(one.bottleneck, one.bottleneck))[:18], 7, "left")
        )
    found.append(_Column("memory", lambda one: _bytes(one.memory.get("host_memory_bytes")), 8))
    if any("utilisation" in one.gpu for one in ranks):
        found.append(_Column("GPU", lambda one: _share(one.gpu.get("utilisation")), 8))
    if any("device_memory_reserved_bytes" in one.memory for one in ranks):
        found.append(_Column("GPU mem", lambda one: _bytes(one.memory.get("device_memory_reserved_bytes")), 4))
    if any("power_w" in one.gpu for one in ranks):
        found.append(_Column("GPU\npower", lambda one: _watts(one.gpu.get("power_w")), 1))
    for number, (name, title) in enumerate(_TRAFFIC.items()):
        if any(one.traffic.get(name, 0) >= _WORTH_TELLING for one in ranks):
            found.append(_Column(title, partial(_traffic, name), 1 - 0.1 * number))
    return found


_WORTH_TELLING = 100 << 10  # bytes a second
_TRAFFIC = {
    "network_received_bytes_per_s": "network\nin, a second",
    "disk_read_bytes_per_s": "disk reads\na second",
    "disk_written_bytes_per_s": "disk writes\na second",
    "network_sent_bytes_per_s": "network\nout, a second",
}


def _table(ranks: Sequence[RankStatus], view: View, width: int) -> Iterator[RenderableType]:
    """A row a rank: its numbers, and pictures beside them where there is room."""
    columns, pictures = _columns(view), list_pictures(ranks, view.rates)

    def needs() -> int:
        return sum(column.width(ranks) + _GAP for column in columns) - _GAP

    def fit(room: int, least: float) -> None:
        while needs() > room and min(column.keep for column in columns) < least:
            columns.remove(min(columns, key=lambda column: column.keep))

    fit(width - len(pictures) * (LEAST_WIDTH + _GAP), _BESIDE_PICTURES)
    fit(width, 98)
    each = 0
    while pictures and (each := (width - needs()) // len(pictures) - _GAP) < LEAST_WIDTH:
        pictures.pop()
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        title = Text(column.title, justify=column.justify)  # type: ignore[arg-type]
        table.add_column(title, justify=column.justify, no_wrap=True)  # type: ignore[arg-type]
    for picture in pictures:
        table.add_column(Text(picture.title), no_wrap=True)
    for one in ranks:
        style = {0: "red", 1: "yellow"}.get(_urgency(one, view.survey))
        numbers = (Text(column.cell(one)) for column in columns)
        table.add_row(*numbers, *(picture.draw(one, min(each, MOST_WIDTH)) for picture in pictures), style=style)
    yield table
    yield from (picture.legend for picture in pictures if picture.legend is not None)


def _urgency(one: RankStatus, found: Survey) -> int:
    """0 for a rank that failed or is silent, 1 for the slowest, 2 for others."""
    if one.state == "failed" or one.rank in found.stale:
        return 0
    return 1 if one.rank == found.slowest else 2


def _doing(one: RankStatus, found: Survey) -> str:
    if one.rank in found.stale:
        return f"silent {_seconds(found.stale[one.rank])}"
    if one.state != "training":
        return one.state
    return shown(one.phase)[:16] + (f" {_seconds(one.phase_s)}" if one.phase_s >= 2 else "")


def _remarks(view: View) -> Iterator[tuple[str, str]]:
    """(sentence, style): what needs attention, and what to do."""
    found = view.survey
    if view.state:
        yield view.state, "bold"
    else:
        if found.advice:
            style = "green" if found.bound in ("devices", "unknown") else "red" if found.stale else "yellow"
            yield found.advice, style
        tuned = _tell_tuning(view.ranks)
        if tuned:
            yield tuned, "dim"
    if found.missing and len(found.missing) < found.world_size:
        yield f"{_ranks(found.missing)}: not seen here. {_UNSEEN}", "dim"


_UNSEEN = "They have not begun, or write to the disk of their own node; run `penstock top` there."


def _tell_tuning(ranks: Sequence[RankStatus]) -> str:
    """Describe and explain the latest tuning by the loader of the rank that waits most."""
    tuned = [one for one in ranks if isinstance(one.recent.get("tuning"), str) and one.recent["tuning"]]
    if not tuned:
        return ""
    one = max(tuned, key=lambda each: each.data_wait_share or 0.0)
    now = [one.recent.get(name, 0) for name in ("fetch_threads", "decode_threads", "read_ahead_bytes")]
    if not all(isinstance(number, int) for number in now):
        return ""
    held = (
        f"{format_count(now[0], 'fetch thread')}, {format_count(now[1], 'decode thread')}, up to {_bytes(now[2])} ahead"
    )
    return f"Loader of rank {one.rank}: {held}. Tuning: {one.recent['tuning']}."


def _ranks(ranks: Sequence[int]) -> str:
    """``Rank 3``, ``Ranks 8 to 15``, ``Ranks 1, 2, 5 and 9 more``."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"Ranks {ranks[0]} to {ranks[-1]}"
    return f"Ranks {list_some(ranks, 6)}"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value / 60:.0f} min"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _watts(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} W"


def _bytes(value: float | None) -> str:
    return "" if value is None else format_bytes(value)
