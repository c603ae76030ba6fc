"""A run as one HTML page: key figures, charts, restarts and notes. Needs no script, no network and no other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from .charts import Chart, Line, Marks, draw
from .run_log import Attempt, RunLog, phases_of
from .style import STYLE
from .summary import clock, describe_rewinds, describe_state, duration, resume_marks
from .svg import percent, short

_PHASES = ("fetch", "forward", "backward", "reduce", "optimizer")  # of a step; others come now and then
_MEMORY = {
    "device_memory_reserved_bytes": "device, reserved",
    "device_memory_peak_bytes": "device, peak",
    "device_memory_bytes": "device",
    "host_memory_bytes": "host",
}
_ONE_RECORD = "Charts are drawn from the second record on; there is one every report.every steps."
_SHOWN_NOTES = 200
_SHOWN_EVALUATIONS = 20


def render_page(run: RunLog, *, title: str, now_s: float) -> str:
    """The page, as HTML; ``now_s`` is when it is made."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)} · penstock report</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1><p>{escape(describe_state(run, now_s))}</p></header>",
        *_failure(run),
        *_figures(run),
        *_charts(run),
        *_phase_table(run),
        *_evaluation_table(run),
        *_attempt_table(run),
        *_list("Rewinds after loss spikes", describe_rewinds(run)),
        *_list("Stalls and failures, as the watchdog of each rank told them", run.stalls),
        *_notes(run),
        f"<footer>{escape(_describe_source(run, now_s))}</footer></body></html>\n",
    ]
    return "".join(parts)


def _failure(run: RunLog) -> Iterable[str]:
    """Render the whole error of a run that failed."""
    if run.error:
        yield f"<section class='failure'><h2>What failed</h2><pre>{escape(run.error)}</pre></section>"


def _figures(run: RunLog) -> Iterable[str]:
    """The newest numbers, as tiles."""
    trained = run.of("train")
    if not trained:
        return
    last = trained[-1]
    tiles: list[tuple[str, str]] = [("step", f"{run.last_step:,}")]
    tiles += [] if run.epochs_done is None else [("epochs done", f"{run.epochs_done:,}")]
    for name, label, form in (
        ("loss", "loss", short),
        ("rate", "learning rate", short),
        ("tokens_per_s", "tokens/s", short),
        ("samples_per_s", "samples/s", short),
        ("mfu", "MFU", percent),
        ("data_wait_share", "data wait", percent),
    ):
        value = last.get(name)
        if isinstance(value, (int, float)):
            tiles.append((label, form(value)))
    spent_s = sum(attempt.ended_s - attempt.began_s for attempt in run.attempts)
    tiles += [("samples", short(last["samples"]))] if isinstance(last.get("samples"), int) else []
    tiles += [
        ("time", duration(spent_s)),
        ("starts", str(sum(attempt.rewind is None for attempt in run.attempts))),
        *([("rewinds", str(len(rewinds)))] if (rewinds := run.of("rewind")) else []),
        ("saves", str(len(run.of("checkpoint")))),
    ]
    yield '<dl class="tiles">'
    yield from (f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in tiles)
    yield "</dl>"


def _charts(run: RunLog) -> Iterable[str]:
    trained = run.of("train")
    if not trained:
        return
    if len({record["step"] for record in trained}) == 1:
        yield f'<p class="hint">{_ONE_RECORD}</p>'
        return
    marks = Marks(resumes=resume_marks(run), saves=[record["step"] for record in run.of("checkpoint")])
    hints = ["Numbers over steps; each point is the mean since the one before."]
    if marks.resumes:
        again = " or training went back after a loss spike" if run.of("rewind") else ""
        hints.append(
            f"Dashed lines: the ranks started again{again}. Pale lines: steps that were made again after that."
        )
    if marks.saves:
        hints.append("Triangles: saves.")
    yield f'<p class="hint">{" ".join(hints)}</p><section class="charts">'
    yield _card(run, marks, "Loss", [("loss", "Loss")], short, from_zero=False, may_be_log=True)
    for name, title, form in (
        ("rate", "Learning rate", short),
        ("tokens_per_s", "Tokens/s", short),
        ("samples_per_s", "Samples/s", short),
        ("mfu", "MFU", percent) if "mfu" in run.names() else ("flops_per_s", "FLOP/s of a device", short),
    ):
        yield _card(run, marks, title, [(name, title)], form)
    yield _phase_card(run, marks)
    wait = "Share of time waiting for data"
    yield _card(run, marks, wait, [("data_wait_share", wait)], percent)
    yield _card(run, marks, "Memory of rank 0, GiB", list(_MEMORY.items()), short, unit=2**-30)
    norms = [("gradient_norm_max", "largest"), ("gradient_norm", "last")]
    yield _card(run, marks, "Norm of the gradients", norms, short, may_be_log=True)
    for name in run.names("evaluate"):
        if name != "seconds":
            title = f"Evaluation: {name}"
            yield _card(run, marks, title, [(name, title)], short, kind="evaluate", from_zero=False)
    yield "</section>"


def _card(
    run: RunLog,
    marks: Marks,
    title: str,
    names: Sequence[tuple[str, str]],
    form: Callable[[float], str],
    *,
    kind: str = "train",
    unit: float = 1.0,
    **options: Any,
) -> str:
    """One chart with its title; empty where there is nothing to draw."""
    lines = []
    for number, (name, label) in enumerate(names):
        found = [
            [(step, None if y is None else unit * y) for step, y in attempt.series(name, kind)]
            for attempt in run.attempts
        ]
        if any(y is not None for points in found for _, y in points):
            pairs = list(zip(run.attempts, found, strict=True))
            pieces, faint = [_lasting(*pair) for pair in pairs], [_repeated(*pair) for pair in pairs]
            lines.append(Line(name=label, pieces=pieces, faint=faint, color=number, dots=kind == "evaluate"))
    return _figure(Chart(title=title, lines=lines, last_step=run.last_step, format=form, marks=marks, **options))


def _phase_card(run: RunLog, marks: Marks) -> str:
    """Milliseconds of a step by phase, one on top of the other."""
    present = {name for record in run.of("train") for name, spent in phases_of(record).items() if spent > 0}
    lines = [
        Line(
            name=phase,
            pieces=[_lasting(attempt, _milliseconds(attempt, phase)) for attempt in run.attempts],
            color=number,
        )
        for number, phase in enumerate(_PHASES)
        if phase in present
    ]
    title = "Milliseconds of a step, by phase"
    return _figure(Chart(title=title, lines=lines, last_step=run.last_step, format=short, marks=marks, stacked=True))


def _milliseconds(attempt: Attempt, phase: str) -> list[tuple[int, float | None]]:
    found: list[tuple[int, float | None]] = []
    for record in attempt.of("train"):
        spent, steps = phases_of(record).get(phase), record.get("steps")
        if spent is not None and isinstance(steps, int) and steps:
            found.append((record["step"], 1e3 * spent / steps))
    return found


def _figure(chart: Chart) -> str:
    picture = draw(chart)
    if not picture:
        return ""
    keys = ""
    if [line.name for line in chart.lines] != [chart.title]:
        items = "".join(
            f'<li><i style="background:var(--c{line.color})"></i>{escape(line.name)}</li>' for line in chart.lines
        )
        keys = f'<ul class="keys">{items}</ul>'
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{keys}{picture}</figure>"


def _lasting(attempt: Attempt, points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    return [point for point in points if point[0] <= attempt.repeated_from]


def _repeated(attempt: Attempt, points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    return [point for point in points if point[0] > attempt.repeated_from]


def _phase_table(run: RunLog) -> Iterable[str]:
    spent = run.phase_seconds()
    if not spent:
        return
    whole, most = sum(spent.values()), max(spent.values())
    yield "<section><h2>Where the time of rank 0 went</h2><table class='bars'>"
    for name, seconds in spent.items():
        bar = f'<div class="bar" style="width:{100 * seconds / most:.1f}%"></div>'
        yield f"<tr><th>{escape(name)}</th><td class='wide'>{bar}</td>"
        yield f"<td>{escape(duration(seconds))}</td><td>{escape(percent(seconds / whole))}</td></tr>"
    yield "</table></section>"


def _evaluation_table(run: RunLog) -> Iterable[str]:
    names = [name for name in run.names("evaluate") if name != "seconds"]
    if not names:
        return
    rows = [
        [f"{record['step']:,}", *(_cell(record.get(name)) for name in names), duration(record.get("seconds"))]
        for record in run.of("evaluate")[-_SHOWN_EVALUATIONS:]
    ]
    newest = f", the last {_SHOWN_EVALUATIONS}" if len(rows) == _SHOWN_EVALUATIONS else ""
    yield f"<section><h2>Evaluations{newest}</h2>"
    yield _table(["step", *names, "took"], rows)
    yield "</section>"


def _attempt_table(run: RunLog) -> Iterable[str]:
    if not run.attempts:
        return
    rows = []
    ends = [*(attempt.rewind for attempt in run.attempts[1:]), None]
    for number, (attempt, rewind) in enumerate(zip(run.attempts, ends, strict=True), start=1):
        again = max(0, attempt.last_step - int(min(attempt.repeated_from, attempt.last_step)))
        saves = [record["seconds"] for record in attempt.of("checkpoint") if isinstance(record.get("seconds"), float)]
        rows.append(
            [
                str(number),
                clock(attempt.began_s),
                _cell(attempt.world_size),
                str(attempt.start.get("device", "–")),
                f"{attempt.first_step:,} – {attempt.last_step:,}",
                f"{again:,}",
                f"{len(attempt.of('checkpoint'))}" + (f", longest {duration(max(saves))}" if saves else ""),
                duration(attempt.ended_s - attempt.began_s),
                "rewound" if rewind is not None else _end_of(attempt),
            ]
        )
    yield f"<section><h2>Starts of the ranks{', and rewinds' if run.of('rewind') else ''}</h2>"
    heads = ["", "began", "ranks", "device of rank 0", "steps", "made again later", "saves", "took", "end"]
    yield _table(heads, rows)
    yield "</section>"


def _end_of(attempt: Attempt) -> str:
    if attempt.end is not None:
        return f"stopped by {attempt.stopped_by}" if attempt.stopped_by else "ended"
    return "failed" if attempt.error else "no end recorded"


def _notes(run: RunLog) -> Iterable[str]:
    notes = [f"step {record['step']:,}: {record.get('note', '')}" for record in run.of("note")]
    left_out = len(notes) - _SHOWN_NOTES
    title = "Notes" if left_out <= 0 else f"Notes, the last {_SHOWN_NOTES} of {len(notes):,}"
    return _list(title, notes[-_SHOWN_NOTES:])


def _list(title: str, texts: Sequence[str]) -> Iterable[str]:
    if texts:
        yield f"<section><h2>{escape(title)}</h2><ul class='notes'>"
        yield from (f"<li>{escape(text)}</li>" for text in texts)
        yield "</ul></section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where the screen is narrow."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _describe_source(run: RunLog, now_s: float) -> str:
    hints = f"Made {clock(now_s)} from {run.path}."
    if run.damaged_lines:
        lines = "1 line was" if run.damaged_lines == 1 else f"{run.damaged_lines:,} lines were"
        hints += f" {lines} damaged and left out."
    return hints


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else short(value) if isinstance(value, float) else str(value)
