"""Numbers and names of the report, as people read them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contenders import GATHER, LIMIT, UNCHECKED, VIEWS
from ..datasets import CASES

NAMES = {
    LIMIT: "bare loop",
    "torch": "torch DataLoader",
    "datasets": "HF datasets",
    VIEWS: "penstock, views",
    GATHER: "penstock, gather",
    UNCHECKED: "penstock, unchecked",
    "spdl-view": "spdl, views",
}
_KINDS = {VIEWS: "views", GATHER: "gathered", UNCHECKED: "unchecked"}


def name_of(contender: str) -> str:
    return NAMES.get(contender, contender)


def kind_of(ours: str) -> str:
    """Short mark that sets one of our contenders apart; empty for the plain one."""
    return _KINDS.get(ours, "")


def title_of(cell: Mapping[str, Any]) -> str:
    """Current title of a workload; old results may hold another."""
    case = CASES.get(cell["workload"])
    return str(cell["title"]) if case is None else case.title


def line_of(cell: Mapping[str, Any], ours: str) -> str:
    """A line of the page: "raw bytes, 40 KB, views, from S3 +20 ms, 2 ranks"; the local disk is not named."""
    parts = [title_of(cell), kind_of(ours), place_of(cell).removeprefix("local").removeprefix(", ")]
    return ", ".join(part.replace("s3", "from S3", 1) for part in parts if part)


def place_of(cell: Mapping[str, Any]) -> str:
    """Store and ranks of a cell, in short: "s3 +20 ms, 2 ranks"."""
    store = _store_of(cell)
    if cell.get("delay_ms"):
        store += f" +{cell['delay_ms']:g} ms"
    return store if cell["ranks"] == 1 else f"{store}, {cell['ranks']} ranks"


def short_place_of(cell: Mapping[str, Any]) -> str:
    """The same for a narrow table: "s3 +20ms x2"."""
    store = _store_of(cell)
    if cell.get("delay_ms"):
        store += f" +{cell['delay_ms']:g}ms"
    return store if cell["ranks"] == 1 else f"{store} x{cell['ranks']}"


def _store_of(cell: Mapping[str, Any]) -> str:
    name: str = cell["store"]
    return {"s3-delay": "s3", "s3-tls": "s3 TLS"}.get(name, name)


def rate(value: float | None) -> str:
    if value is None:
        return "–"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.{1 if scaled >= 9.995 else 2}f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def short_cpu(name: str) -> str:
    """The name of a processor without marks and clock."""
    return name.replace("(R)", "").replace("(TM)", "").partition(" @ ")[0].removesuffix(" Processor")


def reckoned(text: str, is_so: bool) -> str:
    """The text of a figure, marked where it is not of whole passes."""
    return f"~{text}" if is_so else text


def tick(value: float) -> str:
    """A value on an axis: a round number, without needless zeros."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def times(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 9.95 else f"{value:.2f}x"


def microseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f} us" if value >= 99.5 else f"{value:.1f} us"


def size(value: float | None) -> str:
    if not value:
        return "–"
    return f"{value / 2**20:,.0f} MiB" if value < 1 << 30 else f"{value / 2**30:.1f} GiB"


def workers(settings: Mapping[str, Any]) -> str:
    """Workers of a contender, threads or processes, by its settings."""
    if "workers" in settings:
        count = settings["workers"]
        return "no workers" if not count else f"{count} {'worker' if count == 1 else 'workers'}"
    count = settings.get("threads", "")
    if count in ("", "auto"):
        return "threads: auto"
    return f"{count} {'thread' if count == 1 else 'threads'}"
