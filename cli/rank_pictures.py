"""Pictures of a rank in one line of text: what its time goes into, and its rate over the last seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from ..trainer.report.status.rank_status import RankStatus

LEAST_WIDTH, MOST_WIDTH = 20, 80
# What time goes into: a letter, so that no colour is needed, its colour, and the phases that it stands for.
_PARTS = (
    ("d", "waits on data", "black on yellow", ("fetch",)),
    ("f", "forward", "black on cyan", ("forward",)),
    ("b", "backward", "white on blue", ("backward",)),
    ("r", "reduce", "black on magenta", ("reduce", "average", "shares")),
    ("o", "optimizer", "black on green", ("optimizer", "ema")),
    ("e", "evaluates", "black on bright_cyan", ("evaluate", "evaluation fetch")),
    ("s", "saves", "black on bright_green", ("checkpoint", "checkpoint lock")),
)
_REST = "\u00b7"
_SIGNS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@dataclass(frozen=True)
class Picture:
    """Column of pictures: ``draw`` makes that of a rank, of the given width."""

    title: str
    draw: Callable[[RankStatus, int], Text]
    legend: Text | None = None


def list_pictures(ranks: Sequence[RankStatus], rates: Mapping[int, Sequence[float]]) -> list[Picture]:
    """Those that there is something to draw in, the more telling first; ``rates`` of each rank, one a second."""
    found = []
    if any(one.seconds for one in ranks):
        found.append(Picture("where its time goes", _draw_shares, _legend(ranks)))
    length = max((len(rates.get(one.rank, ())) for one in ranks), default=0)
    if length > 1:
        most = max(rate for one in ranks for rate in rates.get(one.rank, (0.0,)))
        counted = "samples" if any(one.samples_per_s is not None for one in ranks) else "steps"

        def draw(one: RankStatus, width: int) -> Text:
            return _draw_course(rates.get(one.rank, ()), most, width)

        found.append(Picture(f"{counted}/s, by seconds", draw))
    return found


def _draw_shares(one: RankStatus, width: int) -> Text:
    """A letter for each share of the time; sums are rounded, so that the letters fill the width."""
    bar, passed, start = Text(), 0.0, 0
    for letter, _, style, phases in _PARTS:
        passed += one.share(*phases)
        stop = max(start, min(width, round(passed * width)))
        bar.append(letter * (stop - start), style)
        start = stop
    return bar.append(_REST * (width - start), "dim")


def _legend(ranks: Sequence[RankStatus]) -> Text:
    text = Text()
    for letter, name, style, phases in _PARTS:
        if any(one.share(*phases) > 0 for one in ranks):
            text.append(letter, style).append(f" {name}   ", "dim")
    return text.append(f"{_REST} other", "dim")


def _draw_course(rates: Sequence[float], most: float, width: int) -> Text:
    """The newest rates, one a column, from 0 to the highest of all ranks."""
    top = len(_SIGNS) - 1
    return Text("".join(_SIGNS[round(top * rate / most) if most else 0] for rate in rates[-width:]))
