"""``penstock doctor``: see whether a machine, or the ranks of a cluster, will carry a run, and say what to mend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.text import Text

from ..loader.errors import ConfigError
from ..tools.doctor.checks import Finding, diagnose, worst
from ..tools.doctor.probes import examine
from ..tools.doctor.ranks import count_ranks, diagnose_together, is_first_here
from .common import Flag, StorageOptions, in_option_words, parse, parse_options, print_json
from .screen import Screen, console, shown, wrapped

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Examine this machine: versions, CUDA, cores, memory, limits, disks and, with a URL, the store and the clock.

    Prints a line for each check, ok, warn or fail, and what to do. Exits with 1 if any fails. Under torchrun the ranks
    also measure the network between them and compare versions and clocks; rank 0 prints, and adds what is not well on
    other hosts.

    example:  penstock doctor s3://bucket/train/

    example:  torchrun --nproc-per-node 8 --no-python penstock doctor s3://bucket/train/
    """

    url: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[URL]", help_behavior_hint="")] = None
    """A folder of your store, which is listed; nothing is written there."""

    storage_option: StorageOptions = ()
    """Option of the store, such as endpoint=http://host:9000; repeatable. Pass secrets in the environment instead."""

    cache_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """The loader's cache_dir=, whose disk is looked at instead of that of penstock's own cache."""

    timeout_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 30.0
    """How long the store may take to answer, and ranks to come."""

    strict: Flag = False
    """Exit with 1 for what is only to look at, too."""

    json: Flag = False
    """Print the result as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(DoctorArguments, "doctor", arguments)
    if not 0 < given.timeout_s < 1e6:
        raise ConfigError(f"--timeout-s {given.timeout_s:g}: must be more than 0 seconds")
    rank, size, here = count_ranks()
    options = parse_options(given.storage_option)
    url = given.url if is_first_here() else None
    facts = examine(
        url=url, storage_options=options, cache_dir=given.cache_dir, timeout_s=given.timeout_s, ranks_here=here
    )
    others: list[tuple[str, list[Finding]]] = []
    if size > 1:
        ranks, hosts = diagnose_together(facts, timeout_s=given.timeout_s)
        facts = dataclasses.replace(facts, ranks=ranks)
        others = hosts[1:] if rank == 0 else []
        if rank != 0 and not ranks.problem:
            # Every rank of a host finds the same: the first of each, and rank 0 what all measured, decide the code.
            return 0
    findings = [
        dataclasses.replace(one, found=in_option_words(one.found), mend=in_option_words(one.mend))
        for one in diagnose(facts)
    ]
    level = worst([*findings, *(finding for _, theirs in others for finding in theirs)])
    if given.json:
        print_json(_plain(findings, others) | {"result": level})
    else:
        show_diagnosis(console(), findings, others)
    return 1 if level == "fail" or (given.strict and level == "warn") else 0


def _plain(findings: Sequence[Finding], others: Sequence[tuple[str, Sequence[Finding]]]) -> dict[str, object]:
    return {
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "other_hosts": {host: [dataclasses.asdict(finding) for finding in theirs] for host, theirs in others},
    }


def show_diagnosis(
    screen: Screen, findings: Sequence[Finding], others: Sequence[tuple[str, Sequence[Finding]]] = ()
) -> None:
    """Print a line for each finding, below it what to mend; then what is not well on other hosts, and the sum."""
    _show_findings(screen, findings)
    everything = list(findings)
    for host, theirs in others:
        everything += theirs
        unwell = [finding for finding in theirs if finding.level != "ok"]
        screen.print()
        screen.print(Text(f"{shown(host)}{'' if unwell else ': ok'}", style="bold"))
        _show_findings(screen, unwell)
    counts = {level: sum(finding.level == level for finding in everything) for level in _STYLES}
    screen.print()
    level = worst(everything)
    if level == "ok":
        screen.print("All is well.", style="green")
        return
    parts = [f"{counts[name]} {word}" for name, word in (("fail", "failed"), ("warn", "to look at")) if counts[name]]
    screen.print(f"Of {len(everything)} checks {', '.join(parts)}.", style=_STYLES[level])


def _show_findings(screen: Screen, findings: Sequence[Finding]) -> None:
    start = max((len(finding.check) for finding in findings), default=0) + 2
    room = screen.width - start - 6
    for finding in findings:
        lines = wrapped(shown(finding.found), room)
        mend = wrapped(shown(finding.mend), room - 2) if finding.mend else []
        for number, line in enumerate(lines):
            check, level = (finding.check, finding.level) if number == 0 else ("", "")
            screen.print(
                Text.assemble((check.ljust(start), "cyan"), (level.ljust(6), _STYLES[finding.level]), line),
                soft_wrap=True,
            )
        for number, line in enumerate(mend):
            screen.print(Text(" " * (start + 6) + ("> " if number == 0 else "  ") + line), soft_wrap=True)
