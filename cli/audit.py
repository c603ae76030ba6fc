"""``penstock audit``: prove from the delivery logs that every sample was delivered exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from ..tools.audit import AuditReport, audit
from ..tools.mixed_audit import MixtureAccount
from .common import Flag, local_path, parse, print_json
from .screen import console, print_grid


@dataclass(frozen=True, kw_only=True)
class AuditArguments:
    """Account for every sample that a run delivered, across all attempts and world sizes.

    Reads the logs that DistributedDataLoader(..., audit_dir=FOLDER) wrote, as the loaders of the shipped recipes do:
    `python -m penstock.trainer digits` logs to runs/digits/audit. Samples that a killed attempt delivered
    after its last checkpoint are delivered again by the next attempt; they are counted as replayed. Batches that the
    run skipped on purpose are counted as skipped, samples that keep= or transform= dropped as dropped, what then fills
    no batch as left, bad samples as bad, and those in whose places others came as replaced. Exits with 0 if every other
    sample was delivered exactly once, and with 1 if any is missing or duplicated. Of a run on a subset, "outside" are
    the samples that it leaves out, and "stray" the rows of these that were delivered all the same. A mixture is
    accounted for by its sources: each sample must come once in each epoch of its source.

    example:  penstock audit runs/digits/audit
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
    """Folder that was passed as audit_dir=."""

    json: Flag = False
    """Print the result as JSON."""


# Columns that are shown where there is something in them, and how a sentence says it.
_RARE = {
    "skipped": "skipped",
    "dropped": "dropped",
    "bad": "bad, and skipped",
    "left": "left, which fill no batch",
    "replaced": "bad, and replaced by others",
}


def run(arguments: Sequence[str]) -> int:
    given = parse(AuditArguments, "audit", arguments)
    report = audit(local_path(given.folder, "FOLDER"))
    if given.json:
        print_json(dataclasses.asdict(report) | {"ok": report.is_exact})
    else:
        show_report(report)
    return 0 if report.is_exact else 1


def show_report(report: AuditReport) -> None:
    """Print the attempts and the account of every epoch."""
    screen = console()
    attempts = [
        [str(number), f"{world_size:,}", f"{epoch:,}", f"{position:,}"]
        for number, (world_size, epoch, position) in enumerate(report.attempts, start=1)
    ]
    print_grid(screen, ("attempt", "ranks", "from epoch", "from position"), attempts)
    screen.print()
    if report.batch_sizes:
        changes = [[f"{epoch:,}", f"{position:,}", f"{size:,}"] for epoch, position, size in report.batch_sizes]
        print_grid(screen, ("from epoch", "from position", "global batch"), changes)
        screen.print()
    if report.mixture is not None:
        _show_mixture(screen, report.mixture)
        return
    counts = {name: sum(getattr(account, name) for account in report.epochs) for name in _RARE}
    shown = [name for name, count in counts.items() if count]
    is_part = any(account.outside for account in report.epochs)
    rows, styles = [], []
    for account in report.epochs:
        numbers = [account.samples, account.reached, account.delivered, account.missing, account.duplicated]
        numbers += [account.replayed, *(getattr(account, name) for name in shown)]
        numbers += [account.outside, account.stray] if is_part else []
        rows.append([str(account.epoch), *(f"{number:,}" for number in numbers)])
        styles.append("red" if account.missing or account.duplicated or account.stray else "")
    header = ["epoch", "samples", "reached", "delivered", "missing", "duplicated", "replayed"]
    header += [*shown, *(["outside", "stray"] if is_part else [])]
    print_grid(screen, header, rows, styles=styles)
    screen.print()
    if any(account.stray for account in report.epochs):
        screen.print("samples from outside of the subset were delivered", style="red")
    elif report.is_exact and shown:
        counted = " and ".join(f"{counts[name]:,} {_RARE[name]}" for name in shown)
        screen.print(f"every sample reached was delivered exactly once, but for {counted}", style="green")
    elif report.is_exact:
        screen.print("every sample reached was delivered exactly once", style="green")
    else:
        screen.print("samples are missing or were delivered more than once", style="red")


def _show_mixture(screen: Console, account: MixtureAccount) -> None:
    rows, styles = [], []
    counts = {name: sum(getattr(source, name) for source in account.sources) for name in ("dropped", "bad", "replaced")}
    shown = [name for name, count in counts.items() if count]
    for source in account.sources:
        numbers = [source.samples, source.epochs, source.delivered, source.missing, source.duplicated, source.replayed]
        numbers += [getattr(source, name) for name in shown]
        rows.append([source.name, *(f"{number:,}" for number in numbers)])
        styles.append("red" if source.duplicated or source.missing > account.skipped else "")
    header = ["source", "samples", "epochs", "delivered", "missing", "duplicated", "replayed"]
    header += shown
    print_grid(screen, header, rows, styles=styles)
    screen.print()
    if account.lost:
        screen.print(f"{account.lost:,} rows of global batches are in no rank's log", style="red")
    if not account.is_exact:
        screen.print("samples are missing or were delivered more than once in an epoch of their source", style="red")
    else:
        counts = {"skipped": account.skipped, **counts}
        counted = [f"{count:,} {_RARE[name]}" for name, count in counts.items() if count]
        but = f", but for {' and '.join(counted)}" if counted else ""
        screen.print(f"every sample was delivered exactly once in each epoch of its source{but}", style="green")
