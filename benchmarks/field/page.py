"""The report as one HTML page that needs nothing else: plots are inline, there is no script, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ...trainer.report.pages.style import STYLE
from ..contenders import GATHER, LIMIT, UNCHECKED, base_of
from . import words
from .plots import draw_rates, draw_ratios
from .summary import best_peer, is_ours, is_reckoned, load_note, median, ratio
from .table import by_speed, figure_of, lines_of, refusals

FIELD_STYLE = """
:root { --good: #00795a; --bad: #b54400; } @media (prefers-color-scheme: dark) { :root { --good: #2fc298; --bad:
#ff8f55; } } header p { max-width: 72ch; } main h2 { margin-top: 34px; } h2 small { color: var(--dim); font-weight:
400; font-size: .85rem; display: block; } svg .name, svg .label { fill: var(--ink); font-size: 11.5px; } svg
.name.ours, svg .value.ours { fill: var(--c0); font-weight: 700; } svg .name.limit, svg .value.limit { fill:
var(--dim); } svg .value { fill: var(--ink); font-size: 11.5px; font-variant-numeric: tabular-nums; } svg .dim {
fill: var(--dim); } svg .label { paint-order: stroke; stroke: var(--card); stroke-width: 4px; } svg rect.bar {
min-width: 0; background: none; } svg rect.ours { fill: var(--c0); } svg rect.peer { fill: var(--dim); opacity: .55;
} svg rect.limit { fill: none; stroke: var(--dim); stroke-dasharray: 3 2; } svg .whisker { stroke: var(--ink);
stroke-width: 1.6; } svg .steady { fill: var(--card); stroke: var(--ink); stroke-width: 1.6; } svg .even { stroke:
var(--dim); stroke-width: 1.4; } svg .track { stroke: var(--rule); } svg .spread { stroke-width: 5; opacity: .4;
stroke-linecap: round; } svg .spread.good { stroke: var(--good); } svg .spread.bad { stroke: var(--bad); } svg
.dot.good { fill: var(--good); } svg .dot.bad { fill: var(--bad); } svg .value.good { fill: var(--good);
font-weight: 600; } svg .value.bad { fill: var(--bad); font-weight: 600; } .key svg { width: 34px; height: 14px;
vertical-align: -2px; margin-right: 4px; } .charts { align-items: start; } .ratios { max-width: 480px; } figure svg
{ margin-top: 4px; } .scroll table { font-size: .86rem; } td.num, th.num { text-align: right; } tr.ours td, tr.ours
th { font-weight: 600; color: var(--c0); } tbody th { font-weight: 400; } blockquote { margin: 4px 0 4px;
padding-left: 10px; border-left: 3px solid var(--rule); } dl.peers dt { color: var(--ink); font-size: 1rem;
font-weight: 600; margin-top: 14px; } dl.peers dd { font-size: .92rem; margin: 0; max-width: 80ch; } a { color:
var(--c0); overflow-wrap: anywhere; } .keys { gap: 4px 16px; } .key { padding-left: 38px; text-indent: -38px; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--dim); } svg .title { fill: var(--ink); font-size:
13px; font-weight: 700; } th.group { border-left: 1px solid var(--rule); padding-left: 8px; } th.group:first-child {
border-left: 0; } code { font-size: .88em; overflow-wrap:
anywhere; }
"""


def draw_picture(found: Mapping[str, Any]) -> str:
    """The ratios of all cells as an SVG file, in light and dark, which other pages can show; "" without peers.

    It leaves out gathered and unchecked bytes, which only tell where the time goes.
    """
    cells = [
        {
            **cell,
            "contenders": {name: one for name, one in cell["contenders"].items() if name not in (GATHER, UNCHECKED)},
        }
        for cell in found["cells"]
    ]
    rounds, machine = found["settings"]["rounds"], found["machine"]
    turns = "one round" if rounds == 1 else f"{rounds} rounds in turn"
    where = f"{machine['cores']} cores of {words.short_cpu(machine['cpu'])}; {turns}"
    plot = draw_ratios(cells, ("First pass: penstock and the best other loader", where))
    head, _, rest = plot.partition(">")  # texts in it are escaped
    named = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" ', 1)
    return f"{named}><style>{STYLE}{FIELD_STYLE}</style>{rest}\n" if plot else ""


def render(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    return "".join(_page(report))


def _page(report: Mapping[str, Any]) -> Iterator[str]:
    cells, machine, settings = report["cells"], report["machine"], report["settings"]
    loads = [load for cell in cells for load in cell["loads"]]
    rounds = settings["rounds"]
    yield "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<title>penstock and other loaders</title><style>{STYLE}{FIELD_STYLE}</style></head><body>"
    yield "<header><h1>penstock and other loaders</h1>"
    yield f"<p>{escape(report['date'][:16].replace('T', ' '))} UTC. {machine['cores']} cores of "
    turns = "One round" if rounds == 1 else f"Medians of {rounds} rounds"
    yield f"{escape(words.short_cpu(machine['cpu']))}. {turns} in which "
    yield "contenders take turns, each run in a process of its own. "
    yield f"{escape(load_note(loads, machine['cores']).capitalize())}.</p></header><main>"
    yield from _tiles(cells)
    yield from _ratio_section(cells)
    yield from _overview_section(cells)
    for workload in dict.fromkeys(cell["workload"] for cell in cells):
        yield from _workload_section([cell for cell in cells if cell["workload"] == workload])
    yield from _refused_section(cells)
    yield from _setup_section(report)
    yield from _method_section(report)
    yield "</main></body></html>\n"


def _tiles(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Render the summary of the table's rows."""
    rows = [(cell["contenders"], ours) for cell, ours in lines_of(cells)]
    found = [(ratio(each, best_peer(each, ours=ours), ours=ours), ratio(each, LIMIT, ours=ours)) for each, ours in rows]
    ratios, limits = [one for one, _ in found if one is not None], [one for _, one in found if one is not None]
    tiles = [("comparisons", str(len(rows)))]
    if ratios:
        ahead = sum(each >= 1 for each in ratios)
        tiles += [("faster than the best other", f"{ahead} of {len(ratios)}")]
        tiles += [("least", words.times(min(ratios))), ("most", words.times(max(ratios)))]
    if limits:
        tiles.append(("share of the bare loop", f"{min(limits):.2f} to {max(limits):.2f}"))
    yield "<dl class='tiles'>"
    yield from (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    yield "</dl>"


def _ratio_section(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    plot = draw_ratios(cells)
    if plot:
        yield "<section><h2>First pass, as a multiple of the best other loader</h2><p class='hint'>The best other "
        yield "loader is the one whose first pass is fastest in that comparison; bytes objects are compared with bytes "
        yield "objects, views with whatever is fastest. Dots are ratios of medians, bands the quartiles of the ratios "
        yield "within a round. Data come from the local disk where nothing else is said.</p>"
        yield f"<figure class='ratios'>{plot}</figure></section>"


_GROUPS = (
    ("", ("",)),
    (
        "samples per second in the first pass",
        ("penstock", "best other", "its name", "ratio", "bare loop", "share of it"),
    ),
    ("CPU time a sample", ("penstock", "best other", "bare loop")),
    ("first batch after", ("penstock", "best other")),
)


def _overview_section(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All comparisons as a table."""
    yield "<section><h2>All comparisons</h2><p class='hint'>Medians of penstock, the best other loader and the bare "
    yield f"loop. {_RECKONED}</p>"
    groups = "".join(f"<th class='group' colspan='{len(names)}'>{group}</th>" for group, names in _GROUPS)
    heads = "".join(f"<th class='num'>{head}</th>" for _, names in _GROUPS for head in names)
    yield f"<div class='scroll'><table><thead><tr>{groups}</tr><tr>{heads}</tr></thead><tbody>"
    for cell, ours in lines_of(cells):
        each = cell["contenders"]
        peer = best_peer(each, ours=ours)
        limit = ratio(each, LIMIT, ours=ours)
        rates = [_rate(each, name) for name in (ours, peer, LIMIT)]
        values = (
            *rates[:2],
            words.name_of(peer) if peer else "–",
            words.times(ratio(each, peer, ours=ours)),
            rates[2],
            "–" if limit is None else f"{limit:.2f}",
            *(words.microseconds(figure_of(each, name, "cpu_us_per_sample")) for name in (ours, peer, LIMIT)),
            *(words.seconds(figure_of(each, name, "first_batch_s")) for name in (ours, peer)),
        )
        row = "".join(f"<td class='num'>{escape(value)}</td>" for value in values)
        yield f"<tr><th>{escape(words.line_of(cell, ours))}</th>{row}</tr>"
    yield "</tbody></table></div></section>"


_RECKONED = "~ marks a pass that was cut: what a whole one takes is reckoned from its start and its rate."


def _rate(contenders: Mapping[str, Any], name: str | None) -> str:
    """The rate of a first pass, marked where it was reckoned."""
    if name is None or name not in contenders:
        return "–"
    rate = words.rate(median(contenders[name]["summary"], "first_pass_per_s"))
    return words.reckoned(rate, is_reckoned(contenders[name]))


_KEYS = (
    ('<rect class="bar ours" x="0" y="2" width="30" height="10" rx="2"/>', "first pass, from the start of the loader"),
    ('<line class="whisker" x1="2" x2="28" y1="7" y2="7"/>', "its quartiles"),
    ('<circle class="steady" cx="15" cy="7" r="4"/>', "steady: passes after the first; from S3, after the first batch"),
    ('<rect class="bar limit" x="1" y="2" width="28" height="10" rx="2"/>', "a bare loop, no loader"),
)


def _workload_section(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    data = cells[0]["data"]
    yield f"<section><h2>{escape(words.title_of(cells[0]))} <small>{data['samples']:,} samples, "
    yield f"{words.size(data['bytes'])} in {data['shards']} {escape(data['format'])} shards; "
    yield f"batches of {cells[0]['batch_size']:,}</small></h2>"
    yield "<ul class='keys'>"
    yield from (f"<li class='key'><svg viewBox='0 0 32 14'>{shape}</svg>{escape(text)}</li>" for shape, text in _KEYS)
    yield "</ul><div class='charts'>"
    for cell in cells:
        plot = draw_rates(cell)
        title = f"{words.place_of(cell)}: samples per second"
        if plot:
            yield f"<figure><figcaption>{escape(title)}</figcaption>{plot}</figure>"
    yield "</div>"
    for cell in cells:
        if cell["contenders"]:
            yield f"<details{' open' if len(cells) == 1 else ''}><summary>All figures: "
            yield f"{escape(words.place_of(cell))}</summary>{_table(cell)}{_notes(cell)}</details>"
    yield "</section>"


_HEADS = ("", "first pass", "steady", "first batch", "resume", "CPU a sample", "peak RSS", "works with")


def _table(cell: Mapping[str, Any]) -> str:
    rows = []
    for name in by_speed(cell["contenders"]):
        entry = cell["contenders"][name]
        summary = entry["summary"]
        values = (
            words.reckoned(_spread(summary, "first_pass_per_s"), is_reckoned(entry)),
            words.rate(median(summary, "steady_per_s")),
            words.seconds(median(summary, "first_batch_s")),
            words.times(median(summary, "resume_ratio")),
            words.microseconds(median(summary, "cpu_us_per_sample")),
            words.size(median(summary, "peak_rss_bytes")),
            words.workers(entry["settings"]),
        )
        cells = "".join(f"<td class='num'>{escape(value)}</td>" for value in values)
        kind = " class='ours'" if is_ours(name) else ""
        rows.append(f"<tr{kind}><th>{escape(words.name_of(name))}</th>{cells}</tr>")
    heads = "".join(f"<th class='num'>{head}</th>" if head else "<th></th>" for head in _HEADS)
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _spread(summary: Mapping[str, Any], name: str) -> str:
    low, middle, high = summary[name]
    return words.rate(middle) + (f" ({words.rate(low)} to {words.rate(high)})" if high > low else "")


def _notes(cell: Mapping[str, Any]) -> str:
    notes = [f"{words.name_of(name)}: {text}" for name, text in cell["notes"].items()]
    return "<ul class='notes'>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else ""


def _refused_section(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = refusals(cells)
    if not found:
        return
    yield "<section><h2>Not measured</h2><ul class='notes'>"
    for (name, reason), where in found.items():
        places = f"{len(where)} comparisons" if len(where) > 3 else "; ".join(where)
        yield f"<li><b>{escape(words.name_of(name))}</b> ({escape(places)}): {escape(reason)}</li>"
    yield "</ul></section>"


def _setup_section(report: Mapping[str, Any]) -> Iterator[str]:
    versions = {
        base_of(name): entry["version"]
        for cell in report["cells"]
        for name, entry in cell["contenders"].items()
        if entry.get("version")
    }
    if not report["peers"]:
        return
    yield "<section><h2>How the others are set up</h2><p class='hint'>By the advice of their own documentation, each "
    yield f"in an environment of its own with pinned packages, with {_workers(report['settings'])}, on a copy of the "
    yield "data in its own format, and checked to deliver every sample once.</p>"
    yield "<dl class='peers'>"
    for name, peer in report["peers"].items():
        yield f"<dt>{escape(words.name_of(name))} {escape(str(versions.get(name, '')))}</dt>"
        yield f"<dd><blockquote>{escape(peer['advice'])}</blockquote>"
        yield f"<a href='{escape(peer['source'], quote=True)}'>{escape(_host(peer['source']))}</a>. Here: "
        yield f"{escape(peer['setup'])}." + (f" Order: {escape(peer['order'])}." if "order" in peer else "") + "</dd>"
    yield "</dl></section>"


def _workers(settings: Mapping[str, Any]) -> str:
    if settings["workers"] is None:
        return "the number of workers (none, one or two a core) that makes a pass shortest here"
    return "no worker processes, which would take longer to start than such small data to read"


def _host(url: str) -> str:
    return url.split("/")[2]


def _method_section(report: Mapping[str, Any]) -> Iterator[str]:
    seconds, machine = report["settings"]["seconds"], report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield "<section><h2>How it is measured</h2><ul class='notes'>"
    yield from (f"<li>{escape(' '.join(fact.format(seconds=seconds).split()))}</li>" for fact in _METHOD)
    yield f"</ul></section><footer><p><code>{escape(report['command'])}</code></p>"
    yield f"<p>{escape(machine['system'])}; {escape(versions)}</p></footer>"


_METHOD = (
    """Each run is a fresh process; imports are not timed, neither those that a loader leaves for later. A first pass is
    timed from the making of the loader to its last batch, so every cost of a start is in it. Runs end {seconds:g} s
    after the first batch; if a first pass is cut there, what a whole one takes is reckoned from its start and its rate,
    and that is told.""",
    """Files come from a warm page cache. From S3 a run is one pass: a second one would come from the copies that peers
    keep on the local disk.""",
    """penstock's chunks are in random order, and so are the samples in each window of some of them, whose length it
    chooses by the size of the chunks. Raw bytes are handed out as a list of bytes objects, as by all others; "views"
    are memoryviews over what was read, "gather" is one tensor of all bytes and one of offsets. "unchecked" reads bytes
    objects of a data set that was indexed without checksums, which the others do not compare either. Of every bytes
    object and view the consumer reads a byte of each page.""",
    """Resume: time to the first batch after a resume in mid-epoch, over that of a fresh start, pair by pair.""",
    """CPU: user and system time of the process tree in the first pass, start-up of the loader included. Peak RSS: the
    sum of the processes' peaks (VmHWM), pages that they share or map counted in each.""",
    """The bare loop reads whole shards with a thread a core and makes batches, without a shuffle: what the
    libraries below allow.""",
)
