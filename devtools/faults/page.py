"""Writes docs/RELIABILITY.md from the bench's results: what each fault did, and what is promised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.loader.errors import ConfigError

from .case import Case
from .cases import CASES
from .hosts.scene import LAUNCHER_S

_HEAD = """# Reliability

What happens to a job when its network, server, processes or disk fail. `python -m devtools faults` makes each fault
between real processes and a real S3 server, and compares every batch with the plan, every sample with a digest.

## What is promised

- **No sample is lost, repeated or mixed up** by any fault below, in the job that meets it or the one that continues
  from its last position, on any number of ranks.
- **Passing faults are waited for**: requests are retried for two minutes. A bad response costs at most 30 seconds,
  mostly none.
- **Lasting faults are errors** that name the object and what to do. The next start, or `next`, continues after the last
  batch that was handed out.
- **An error on one rank reaches all in seconds**, with the [first cause](#when-one-rank-fails).
- **The cache is never trusted.** Damaged entries are fetched again; a full or read-only disk costs only speed.
- **Nothing is left behind**: after `close()` no thread or descriptor, after a SIGKILL no lock or shared memory.

Not promised are speed under faults, and:

- **Right bytes without checksums**: `penstock index` and `pack` store them; an index that a first use builds has none.
- **No repetition after a kill**: batches since the last checkpoint come again; `penstock audit` counts them.
- **An end of ranks that hang inside a collective**: the trainer's watchdog and torchrun end them, not the loader.

"""

_ONE_RANK = """## When one rank fails

A loader whose error ends a pass tells all ranks through the process group's key-value store, without a trainer or a
collective.

- A rank that **waits for a batch**, or trains, raises `RankStoppedError`, now or at its next batch: "rank 1 stopped:
  ChecksumError: shard-000007.tar at byte 0: ...".
- A rank that is **blocked in a collective** cannot be woken safely. Its log has the first cause at once. When the
  failing rank exits, gloo fails on the others, and torchrun, or the trainer's watchdog, ends them.
- A rank that **cannot make its loader** ends the others at their first batch, in an initialised process group.
- A rank that **falls silent** (stopped, host down or cut off) is reported to all after two to three minutes.
- Ranks that **call differently** (`set_batch_size`, `set_weights`, `set_shares`, `skip_batches`: other values, another
  batch, or not at all) get an error in seconds that names both.

Each error is raised once on each rank. To continue with `next`, catch it on all ranks or on none.

"""

_FEW_WORDS = 2  # which are said again rather than a ditto mark

_GROUPS = {
    "network": "Network and server",
    "process": "3 ranks, 2 workers, launcher",
    "node": "Disk, cache, memory, clock",
}


_HOSTS = f"""## Hosts and the network between them

A link that goes down is silent: no connection is reset. Each host here is a network namespace of one machine, with a
rank of the trainer under torchrun, on gloo, `stall_timeout_s=10`. `penstock audit` accounts for every sample, also of
jobs that were started again on one host less.

- *Named*: all ranks end within `stall_timeout_s`. Those that reach the store name the silent rank and host, the
  others the store and rank 0's host.
- *Ended*: seconds from the fault. Torchrun was killed if it was there {LAUNCHER_S:.0f} s after the ranks.

"""

_BEYOND = """An outage costs up to twice its length, as TCP retries ever more rarely. One shorter than a third of
`stall_timeout_s` (600 s by default) passes. [What to
set](training_faults.md#several-hosts-and-the-network-between-them) on hosts. Also:

- **torchrun hangs on a host that cannot reach `--rdzv-endpoint`** for a quarter of an hour, or two minutes (measured:
  109 s) with `sysctl net.ipv4.tcp_retries2=8`, though its ranks have ended. Watch the ranks.
- **Until the trainer is made**, a rank cut off from the store ends within three minutes; others wait for
  `open_world(timeout_s=)`.
- **Without the trainer**, a loader reports silence before a collective times out (30 minutes with gloo, 10 with NCCL).

"""


def write_page(results: Path, page: Path) -> None:
    """Write the page from the results of the cases and of the soak.

    Raises:
        ConfigError: there are none.
    """
    try:
        found: dict[str, Any] = json.loads(results.read_text())
        cases = found["cases"]
    except (OSError, KeyError) as exc:
        raise ConfigError(f"{results}: no results; make them with --results {results.parent}") from exc
    text = _HEAD + _ONE_RANK + "".join(_list_tables(cases["rows"])) + "".join(_list_hosts(cases["rows"]))
    if "soak" in found:
        text += _describe_soak(found["soak"])
    text += _describe_run(cases)
    page.write_text(text)


def _list_tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    played = [row for row in rows if not row["skipped"] and row["group"] != "none"]
    missing, repeated, wrong = (sum(row[name] for row in played) for name in ("missing", "repeated", "wrong"))
    yield (
        f"## What each fault did\n\nIn all {len(played)} cases, and the jobs that continued them, {missing} samples "
        f"were missing, {repeated} came twice, and {wrong} had wrong content.\n\n"
        "- *Wait*: the longest time without a batch; *error*: from the fault to the error on all ranks; in seconds.\n"
        "- *Speed*: that of a job without a fault is 1.\n"
        "- *What you see*: empty: nothing, but for the wait. *″*: the same as above.\n\n"
    )
    found = {row["name"]: row for row in rows}
    for group, title in _GROUPS.items():
        yield f"### {title}\n\n"
        yield "| fault | what you see | wait | error | speed |\n"
        yield "| --- | --- | --- | --- | --- |\n"
        before = ""
        for case in CASES:
            if case.group == group and case.name in found:
                row = found[case.name]
                yield _format_row(case, row, before=before)
                before = _describe_sight(case, row)
        yield "\n"


def _list_hosts(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {row["name"]: row for row in rows}
    cases = [case for case in CASES if case.group == "hosts" and case.name in found]
    if not cases:
        return
    yield _HOSTS
    yield "| fault | what you see | wait | ranks ended | torchrun ended |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    before = ""
    for case in cases:
        row = found[case.name]
        launcher = ""
        if row["ended"] != "finished" and not row["skipped"]:
            launcher = "killed" if row.get("launcher_s") is None else f"{row['launcher_s']:.1f}"
        row = row | {"ended": "", "share_of_speed": None}
        yield _format_row(case, row, last=launcher, before=before)
        before = _describe_sight(case, row)
    yield "\n" + _BEYOND


def _describe_sight(case: Case, row: dict[str, Any]) -> str:
    """The sight of the fault to a user, and limits that did not hold."""
    if row["skipped"]:
        return f"not played here: {row['skipped']}"
    sees = " ".join(filter(None, [f"`{row['error']}`" if row["ended"] == "error" else "", case.sees]))
    return sees + (f" **{'; '.join(row['failures'])}**" if row["failures"] else "")


def _format_row(case: Case, row: dict[str, Any], *, last: str = "", before: str = "") -> str:
    """A row of a table; what is seen as in the row ``before`` is not said again."""
    sees = _describe_sight(case, row)
    if sees == before and len(sees.split()) > _FEW_WORDS:
        sees = "″"
    if row["skipped"]:
        return f"| {case.fault} | {sees} | | | |\n"
    error = "" if row["error_s"] is None else f"{row['error_s']:.1f}"
    speed = last if row["share_of_speed"] is None else f"{row['share_of_speed']:.2f}"
    return f"| {case.fault} | {sees} | {row['gap_s']:.1f} | {error} | {speed} |\n"


def _describe_soak(soak: dict[str, Any]) -> str:
    resident, allocated = (soak[name] / 2**20 for name in ("growth_bytes", "growth_allocated_bytes"))
    growth = (
        f"{resident:.1f} MiB resident, {allocated:.1f} MiB by malloc, "
        f"{soak['growth_threads']} threads that do not fetch, {soak['growth_descriptors']} descriptors"
    )
    machine = f"{soak['machine']['cores']} cores of {soak['machine']['cpu']}"
    outcome = "; ".join(soak["failures"]) if soak["failures"] else "Every limit held."
    faults = f"{sum(soak['faults'].values())}, of {len(soak['faults'])} kinds"
    outside = soak["missing"], soak["repeated"], soak["wrong"], soak["misplaced"]
    return f"""## A soak

`{_current(soak["command"])}`: random faults for {soak["seconds"] / 60:.0f} minutes on {soak["ranks"]} ranks of
torchrun, fewer after restarts ({soak["date"][:10]}, {machine}).

| | |
| --- | --- |
| faults | {faults} |
| starts of the job | {soak["attempts"]} |
| samples | {soak["delivered"]:,} |
| missing, repeated, wrong, misplaced | {", ".join(map(str, outside))} |
| replayed after kills | {soak["replayed"]:,} |
| requests, retries | {soak["requests"]:,}, {soak["retries"]:,} |
| longest wait | {soak["gap_s"]:.1f} s |
| growth of a process | {growth} |

{outcome}

"""


def _describe_run(cases: dict[str, Any]) -> str:
    runs = ";\n".join(map(_describe_command, [cases, *cases.get("also", [])]))
    return f"""## Make it yourself

```console
python -m devtools faults --list                            # every case, and how the fault is made
python -m devtools faults --only drip cache                 # some of them
python -m devtools faults --soak 30m --ranks 3              # random faults
python -m devtools faults --page docs/RELIABILITY.md        # write this page
```

[Measured](../benchmarks/results/faults.json) by {runs}.
Small disks, cgroups and hosts need root. Not played: NCCL between hosts, stores other than S3.
"""  # fmt: skip


def _describe_command(run: dict[str, Any]) -> str:
    machine = run["machine"]
    load = f", load {machine['load_1m']:.0f}" if "load_1m" in machine else ""
    return f"`{_current(run['command'])}` ({run['date'][:10]}, {machine['cores']} cores of {machine['cpu']}{load})"


def _current(command: str) -> str:
    """The command as it is called now; results keep what was typed."""
    return command.replace("python -m penstock.benchmarks.faults", "python -m devtools faults")
