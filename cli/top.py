"""``penstock top``: the ranks of a training run, live."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..loader.errors import ConfigError
from ..storage.files import check_output
from ..storage.observability.timeline import Event, write_chrome_trace
from ..storage.suggestions import did_you_mean
from ..trainer.errors import TrainerError
from ..trainer.report.pages.run_log import find_log, read_last, read_run
from ..trainer.report.pages.summary import describe_state
from ..trainer.report.status.rank_status import FOLDER, RankStatus, Silence, find_failed, read_ranks
from ..trainer.report.status.servers import read_servers
from ..trainer.report.status.survey import Survey, survey
from ..trainer.report.status.timelines import LONGEST_S, ask_for_timeline, take_parts, withdraw
from .common import Flag, console, format_count, local_path, parse, print_json
from .keys import Keys
from .screen import shown
from .top_servers import ServersView
from .top_view import View, show_view

_EVERY_S = 1.0
_REMEMBERED = 120  # rates of a rank, one a second
_GLANCE_S = 0.1
_OTHER_LINES = 12  # of a view, besides its rows
_LEAVING = "q or Ctrl-C ends this view, not the run."
_WAITING = "If it starts again, it is shown here. q or Ctrl-C ends this view."
_PATIENCE_S = 15.0  # for ranks to notice a request, and to write their answer; or to write at all


@dataclass(frozen=True, kw_only=True)
class TopArguments:
    """Show the ranks of a training run live: rates, waits, phases, memory; who is slowest, what bounds it and what to
    change. Of a run over a parameter server on Ray, its shards and workers: versions, bytes, who is behind and who
    waits.

    Each rank writes a small file into the run's output_dir; where nodes share no disk, a node shows its own ranks.
    It waits for a run that has not begun, and shows it until its training ends. q or Ctrl-C ends the view, and the run
    goes on. In a pipe it prints one view.

    example:  penstock top runs/digits
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
    """The output_dir of a run."""

    once: Flag = False
    """Print one view, and end."""

    json: Flag = False
    """Print one view as JSON."""

    timeline: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Have every rank record what its threads do, and write that as one Chrome trace, to open in ui.perfetto.dev."""

    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 5.0
    """How many seconds to record for --timeline; at most 60."""


def run(arguments: Sequence[str]) -> int:
    given = parse(TopArguments, "top", arguments)
    path = local_path(given.run, "RUN")
    if given.timeline is None and given.seconds != TopArguments.seconds:
        raise ConfigError("--seconds without --timeline, which it is for; add that")
    if given.timeline is not None:
        return _record_timeline(_find_run(path), local_path(given.timeline, "--timeline"), given.seconds)
    servers = look_at_servers(path)
    if servers is not None and (given.json or given.once or not sys.stdout.isatty()):
        _show_servers(servers, as_json=given.json)
        return 0
    if given.json:
        print_json(_describe(_find_run(path)))
        return 0
    if given.once or not sys.stdout.isatty():
        show_view(console(), _look_once(_find_run(path)))
        return 0
    try:
        _watch(path)
    except KeyboardInterrupt:  # the usual way to leave
        print()
    return 0


def look_at_servers(folder: Path) -> ServersView | None:
    """The view of a run over a parameter server; None if the newest run there is none."""
    status = read_servers(folder)
    if status is None or any(one.time > status.time for one in read_ranks(folder)):
        return None
    return ServersView(name=str(folder), status=status, now=time.time())


def _show_servers(view: ServersView, *, as_json: bool) -> None:
    if as_json:
        print_json({"running": not view.state, "state": view.state, "servers": asdict(view.status)})
        return
    screen = console()
    for part in view.render(screen.width):
        screen.print(part)


def _find_run(path: Path) -> Path:
    """The output_dir of a run that was begun.

    Raises:
        TrainerError: there is none.
    """
    if path.is_dir() and (path / FOLDER).is_dir():
        return path
    log = find_log(path)
    if log.name != "metrics.jsonl":
        raise TrainerError(f"{path} is a file; give the output_dir of a run")
    return log.parent


class Looker:
    """Repeated views of a run. Mutable state: since when ranks are silent, and the rates of the last views."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._silence = Silence()
        self._rates: dict[int, deque[float]] = {}

    def look(self) -> View:
        """Read the current view."""
        folder = self._folder
        ranks = read_ranks(folder)
        silent_s = self._silence.note(ranks)
        found = survey(ranks, time.time(), silent_s=silent_s)
        is_running = any(one.state in ("starting", "training", "idle") and one.rank not in found.stale for one in ranks)
        for one in ranks if is_running else ():
            rate = one.steps_per_s if one.samples_per_s is None else one.samples_per_s
            self._rates.setdefault(one.rank, deque(maxlen=_REMEMBERED)).append(rate)
        return View(
            name=str(folder),
            ranks=ranks,
            survey=found,
            last=read_last(folder / "metrics.jsonl", "train"),
            state="" if is_running else _explain(folder, ranks, found),
            rates={rank: list(rates) for rank, rates in self._rates.items()},
        )


def _look_once(folder: Path) -> View:
    """Read the folder once. A rank that is silent by a skewed clock gets the time to write another file."""
    looker = Looker(folder)
    view = looker.look()
    periods_s = [one.every_s for one in view.ranks if one.rank in view.survey.stale]
    deadline_s = time.monotonic() + min(2 * max(periods_s, default=0.0), _PATIENCE_S)
    while view.survey.stale and time.monotonic() < deadline_s:
        time.sleep(_GLANCE_S)
        view = looker.look()
    return view


def _explain(folder: Path, ranks: Sequence[RankStatus], found: Survey) -> str:
    """Explain why no rank trains here, and where a new start would resume."""
    path = folder / "metrics.jsonl"
    failed = find_failed(ranks)
    if failed is not None:
        saved = read_last(path, "checkpoint")
        then = f" The last save is of step {saved['step']:,}." if saved is not None else ""
        error = failed.error.rstrip(" .\n")
        return f"The run failed. Rank {failed.rank} on {failed.host}: {error}.{then}"
    stopped = [one for one in ranks if one.state == "stopped"]
    if stopped:
        one = min(stopped, key=lambda each: " " in each.stopped_by)  # a signal's name, of the rank that got it
        then = "nothing is saved" if one.resumes_at is None else f"a new start resumes at step {one.resumes_at:,}"
        of = f" of {one.total_steps:,}" if one.total_steps else ""
        return f"Stopped by {one.stopped_by} after step {one.step:,}{of}; {then}."
    ending = describe_state(read_run(path), time.time(), ago="ago") if path.is_file() else ""
    if found.stale:
        return (
            f"All ranks have been silent for {min(found.stale.values()):.0f} s: the run was killed, or its nodes or "
            f"their disk hang. {ending}"
        ).rstrip()
    if not ranks:
        why = "report.status_s is off, they write elsewhere, or the run is over a parameter server without --ray"
        return f"No rank writes its state here: {why}. {ending}".rstrip()
    return ending or "The run has ended."


def _watch(path: Path) -> None:
    """Show the run until its training ends or the user leaves; one that is missing or failed may start yet."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    screen = console()
    looker: Looker | None = None
    with Keys() as keys, Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            servers = look_at_servers(path)
            if servers is not None:
                hint = () if servers.is_over else (Text(""), Text(_LEAVING, style="dim"))
                live.update(Group(*servers.render(screen.width), *hint), refresh=True)
                if servers.is_over or "q" in keys.wait(_EVERY_S).lower():
                    return
                continue
            if looker is None and _has_begun(path):
                looker = Looker(_find_run(path))
            if looker is None:
                live.update(Text(f"{shown(str(path))}: {_describe_wait(path)}"), refresh=True)
            else:
                view = looker.look()
                is_over = bool(view.ranks) and all(one.state == "ended" for one in view.ranks)
                hint = () if is_over else (Text(""), Text(_WAITING if view.state else _LEAVING, style="dim"))
                rows = max(4, screen.height - _OTHER_LINES)
                live.update(Group(*view.render(screen.width, rows=rows), *hint), refresh=True)
                if is_over:
                    return
            if "q" in keys.wait(_EVERY_S).lower():
                return


def _describe_wait(path: Path) -> str:
    near = did_you_mean(path.name, (one.name for one in path.parent.glob("*") if _has_begun(one)))
    return f"waiting for a run to begin there{near}. q or Ctrl-C ends the wait."


def _has_begun(path: Path) -> bool:
    """Return whether there is a run to show. A path that cannot be one is an error at once."""
    return path.is_file() or (path / FOLDER).is_dir() or (path / "metrics.jsonl").is_file()


def _describe(folder: Path) -> Mapping[str, Any]:
    view = _look_once(folder)
    return {
        "running": not view.state,
        "state": view.state,
        "survey": asdict(view.survey),
        "ranks": [asdict(one) for one in view.ranks],
        "train": view.last,
    }


def _record_timeline(folder: Path, path: Path, seconds: float) -> int:
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"seconds={seconds:g} must be above 0 and at most {LONGEST_S:g}")
    view = _look_once(folder)
    awaited = {
        one.rank for one in view.ranks if one.state in ("training", "idle") and one.rank not in view.survey.stale
    }
    if not awaited:
        raise TrainerError(f"{folder}: no rank trains now that could record a timeline. {view.state}")
    try:
        check_output(path)  # what cannot be written is told before the wait, not after it
        request = ask_for_timeline(folder, seconds)
    except OSError as exc:
        raise TrainerError(f"{path} or {folder / FOLDER} cannot be written ({exc.strerror or exc})") from exc
    period_s = max(one.every_s for one in view.ranks)
    print(f"{format_count(len(awaited), 'rank')} record for {seconds:g} s", file=sys.stderr)
    parts: dict[int, list[Event]] = {}
    try:
        deadline_s = time.monotonic() + seconds + _PATIENCE_S + 3 * period_s
        while not awaited <= set(parts) and time.monotonic() < deadline_s:
            time.sleep(0.2)
            parts = take_parts(folder, request)
    finally:
        withdraw(folder, request)
    if not parts:
        raise TrainerError(
            f"{folder}: no rank answered within {seconds + _PATIENCE_S + 3 * period_s:.0f} s; are they alive?"
        )
    count = write_chrome_trace(
        path, [_of_rank(event, rank) for rank, events in sorted(parts.items()) for event in events]
    )
    late = sorted(awaited - set(parts))
    if late:
        print(f"no answer from ranks {', '.join(map(str, late))}", file=sys.stderr)
    console().print(
        f"{path}: {count:,} spans of {format_count(len(parts), 'rank')}; open it in https://ui.perfetto.dev"
    )
    return 0


def _of_rank(event: Event, rank: int) -> Event:
    """The event with the rank in place of the process id, which hosts may have in common."""
    return {**event, "pid": rank}
