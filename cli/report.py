"""``penstock report``: a training run as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from ..storage.files import write_output
from ..trainer.errors import TrainerError
from ..trainer.report.pages.page import render_page
from ..trainer.report.pages.run_log import find_log, read_run
from ..trainer.report.pages.summary import describe_state, summarize
from .common import Flag, console, fact_table, format_bytes, format_count, local_path, parse, print_json


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Draw a training run as one HTML page, also while it runs: loss, rate, throughput, MFU, memory, restarts.

    The page needs no network and no other file, so it can be sent and kept. Make it anew to see a run go on.

    example:  penstock report runs/digits
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
    """The output_dir of a run, or its metrics.jsonl."""

    output: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Where to write the page; report.html beside metrics.jsonl if not given."""

    json: Flag = False
    """Print what the page tells as JSON, and write no page."""


def run(arguments: Sequence[str]) -> int:
    given = parse(ReportArguments, "report", arguments)
    path = find_log(local_path(given.run, "RUN"))
    log, now_s = read_run(path), time.time()
    if given.json:
        print_json(summarize(log, now_s))
        return 0
    output = path.with_name("report.html") if given.output is None else local_path(given.output, "--output")
    page = render_page(log, title=path.resolve().parent.name, now_s=now_s).encode("utf-8", "backslashreplace")
    try:
        write_output(output, page)
    except OSError as exc:
        raise TrainerError(f"{output} cannot be written ({exc.strerror or exc}); give --output FILE") from exc
    facts = fact_table()
    facts.add_row("run", describe_state(log, now_s))
    if log.damaged_lines:
        facts.add_row("left out", format_count(log.damaged_lines, "damaged line"))
    facts.add_row("page", f"{output} ({format_bytes(len(page))})")
    console().print(facts)
    return 0
