"""``penstock audit``: prove from the delivery logs that every sample was delivered exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from ..loader.tools.audit import AuditReport, audit
from .common import Flag, console, parse, print_json


@dataclass(frozen=True, kw_only=True)
class AuditArguments:
    """Account for every sample that a run delivered, across all attempts and world sizes.

    Reads the logs that DistributedDataLoader(..., audit_dir=FOLDER) wrote. Samples that a killed attempt delivered
    after its last checkpoint are delivered again by the next attempt; they are counted as replayed. Batches that the
    run skipped on purpose are counted as skipped. Exits with 0 if every other sample was delivered exactly once, and
    with 1 if any is missing or duplicated.

    example:  penstock audit runs/digits/audit
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
    """Folder that was passed as audit_dir=."""

    json: Flag = False
    """Print the result as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(AuditArguments, "audit", arguments)
    report = audit(given.folder)
    if given.json:
        print_json(dataclasses.asdict(report) | {"ok": report.is_exact})
    else:
        show_report(report)
    return 0 if report.is_exact else 1


def show_report(report: AuditReport) -> None:
    """Print the attempts and the account of every epoch."""
    screen = console()
    attempts = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("attempt", "ranks", "from epoch", "from position"):
        attempts.add_column(name, justify="right")
    for number, (world_size, epoch, position) in enumerate(report.attempts, start=1):
        attempts.add_row(str(number), f"{world_size:,}", f"{epoch:,}", f"{position:,}")
    screen.print(attempts)
    screen.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = ["epoch", "samples", "reached", "delivered", "missing", "duplicated", "replayed"]
    skipped = sum(account.skipped for account in report.epochs)
    for name in (*names, "skipped") if skipped else names:
        table.add_column(name, justify="right")
    for account in report.epochs:
        numbers = (account.samples, account.reached, account.delivered, account.missing, account.duplicated)
        bad = account.missing or account.duplicated
        others = (account.replayed, account.skipped) if skipped else (account.replayed,)
        cells = [f"{number:,}" for number in (*numbers, *others)]
        table.add_row(str(account.epoch), *cells, style="red" if bad else None)
    screen.print(table)
    screen.print()
    if report.is_exact and skipped:
        screen.print(f"every sample reached was delivered exactly once, but for {skipped:,} skipped", style="green")
    elif report.is_exact:
        screen.print("every sample reached was delivered exactly once", style="green")
    else:
        screen.print("samples are missing or were delivered more than once", style="red")
