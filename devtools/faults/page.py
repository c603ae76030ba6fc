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

What happens to a job when its network, its server, its processes or its disk fail: what you see, what is lost, and how
long it takes. The tables are measured. `python -m devtools faults` makes each fault between real processes
and a real S3 server, compares every batch with the plan and the content of every sample with a digest, and fails where
a limit does not hold. `python -m devtools faults --page docs/RELIABILITY.md` makes this page.

## What is promised

- **No sample is lost, given twice or mixed up** by any fault below: neither in the job that meets it, nor in the one
  that goes on from its last position, on any number of ranks.
- **What may pass is waited for.** Requests are tried again for two minutes. A single bad response costs at most 30
  seconds and mostly none, because a second request overtakes it. A warning says so where it lasts longer than ten
  seconds. A 403 by a store that answered before, or a 404 for an indexed object, is asked about twice more.
- **What cannot pass is an error** that names the object and says what to do. The position stays at the last batch that
  was handed out, so the next start, or the next call of `next`, goes on there.
- **An error on one rank reaches all ranks in seconds**, each with the first cause ([below](#when-one-rank-fails)).
- **The cache is never trusted.** Entries are bound to their names and have checksums; what is damaged, cut, swapped or
  gone is fetched again. A disk that fills up or becomes read-only costs speed, not the run.
- **Nothing is left behind**: after `close()` no thread and no descriptor, and after a SIGKILL no lock and no shared
  memory. A request that hangs keeps its thread until its time is over, up to half a minute.

## What is not promised

- **Right bytes without checksums.** `penstock index` and `penstock pack` store checksums. The index that a first use
  builds has none: then a damaged tar or token file can give wrong samples, which no reader could tell.
- **Batches that a killed process had taken** are given again to the job that goes on from an earlier position. That is
  what a checkpoint needs; `penstock audit` counts them as replayed.
- **Speed under faults.** A storm of errors at 30% of all requests makes a job several times slower while it lasts.
- **A rank that hangs inside a collective.** The loader does not end processes. The trainer's watchdog does, and
  torchrun does once one rank has ended.
- **Whoever may write to your data set** may also write an index for it, with the checksums of other samples.

"""

_ONE_RANK = """## When one rank fails

A loader whose error ends a pass tells all ranks of its process group, through the group's key-value store. It needs no
trainer and no collective, and never initialises `torch.distributed`. This holds for loaders whose data several ranks
share; one with `rank=0, world_size=1` of its own is alone.

- A rank that **waits for a batch** is woken and raises `RankStoppedError`: "rank 1 stopped: ChecksumError:
  shard-000007.tar at byte 0: ...". So does a rank that **trains**, at its next batch, whatever is ready.
- A rank that is **blocked in a collective**, such as DDP's all-reduce, cannot be woken from outside: aborting a
  communicator from another thread is not safe with every backend. Its log names the first cause at once, above the
  error of gloo or NCCL. If the collective ends before the process does, it raises `RankStoppedError` at its next batch.
  When the failing rank exits, gloo fails at once on the others, and torchrun ends them. With `DistributedTrainer` the
  watchdog ends blocked ranks and names the same cause.
- The **failing rank** holds its error back until the others know of it, for two seconds at most. If another one failed
  before, a note at its error says so.
- Each error is raised once on each rank. Whoever catches it goes on with `next`; catch it on all ranks or on none.
- A loader that **cannot be made** on one rank (a folder that it cannot write, a file that is missing there) ends the
  others in the same way, once the process group is initialised: at their first batch, or in the log of a rank that is
  blocked before it. Where all ranks fail alike, each raises its own error at once.
- A rank that **falls silent**, as its process is stopped or its host down or cut off, tells nobody. Each rank counts up
  a key of the store every five seconds, and looks whether the next one still does; after two minutes its silence is
  told to all ranks as its error. A rank that is cut off from the store says so after two to three minutes.
- Ranks that are **told different things** are told so: `set_batch_size`, `set_weights`, `set_shares` and
  `skip_batches` are compared between the ranks. A call with other values or at another batch, or one that a rank left
  out, is an error within seconds that names both ranks. This holds for loaders that all ranks of the process group
  share, or all of a mesh that has all ranks.

A thread looks at the store twice a second (less often in worlds of more than a thousand ranks), from when the loader is
made to its end. A batch costs two comparisons more.

"""

_GROUPS = {
    "network": "Network and server",
    "process": "Ranks, workers, launcher",
    "node": "Disk, cache, memory, clock",
}


_HOSTS = f"""## Hosts and the network between them

Each host is a network namespace of one machine, with its own device on a network that loses, delays or cuts off
frames. torchrun starts a rank of the trainer on each, on gloo, with `stall_timeout_s=10`. A link that goes down is
silent: no connection is reset, and without a watchdog ranks would wait for half an hour. Where a fault ended the job,
it was started again on one host less, from its last checkpoint or state, and `penstock audit` accounts for every
sample of both parts. *Ranks ended after*: from the fault until no rank was left on any host. *torchrun after*: its own
processes; they were killed where they had not ended {LAUNCHER_S:.0f} s after the ranks.

"""

_BEYOND = """**How long an outage may last.** TCP tries again ever more rarely, so that an outage costs up to twice its
length. One that is shorter than a third of `stall_timeout_s` (600 s by default) passes; a longer one may end the run.

What torch decides here, and what to set:

- **torchrun itself hangs on a host that cannot reach `--rdzv-endpoint`**, though its ranks have ended: its request to
  the rendezvous waits until TCP gives up, after a quarter of an hour, or with `sysctl net.ipv4.tcp_retries2=8` on each
  host after two minutes (measured: 109 s). It also hangs on a host that is cut off after its ranks have ended well, and
  then exits with 1, while torchrun on the others waits five minutes for it and exits with 0. Whoever watches processes
  should watch the ranks.
- **Before the ranks have met** nobody watches: `open_world(timeout_s=)`, 1,800 s by default, bounds how long they wait
  for one another; the error names the ranks that did not come. Between that and the trainer a rank that is cut off
  from the store ends within three minutes, and the others wait for it as long as `timeout_s`.
- **Without the trainer** a loader tells of silence after two to three minutes, as the host may come back before: with
  `RankStoppedError` at the next batch, and in the log, which names the rank and its host before a collective's own
  time-out ends it (30 minutes with gloo, 10 with NCCL, unless `init_process_group(timeout=)` says otherwise). A rank
  that was cut off before it made its loader is waited for, with a warning after a minute.
- **A host whose name does not resolve, or one on several networks** needs `--rdzv-conf=is_host=1` on the host of
  `--rdzv-endpoint` and `is_host=0` on the others, `--local-addr=` with each host's own address, and
  `GLOO_SOCKET_IFNAME` (`NCCL_SOCKET_IFNAME`) with the device's name. Without the first, torchrun may find that no host
  is the one of the endpoint, and fails after a minute with "client socket has timed out".

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
    yield (
        "## What each fault did\n\n*Lost, twice, wrong*: samples missing, delivered twice, or with another content "
        "than they should have, in the job and its continuation. *Longest wait*: the longest time without a batch, "
        "the first included. *Error after*: from the fault to the error, on all ranks. *Speed*: that of a job without "
        "a fault is 1.\n\n"
    )
    found = {row["name"]: row for row in rows}
    for group, title in _GROUPS.items():
        yield f"### {title}\n\n"
        yield "| fault | what you see | lost, twice, wrong | longest wait | error after | speed |\n"
        yield "| --- | --- | --- | --- | --- | --- |\n"
        for case in CASES:
            if case.group == group and case.name in found:
                yield _format_row(case, found[case.name])
        yield "\n"


def _list_hosts(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {row["name"]: row for row in rows}
    cases = [case for case in CASES if case.group == "hosts" and case.name in found]
    if not cases:
        return
    yield _HOSTS
    yield "| fault | what you see | lost, twice, wrong | longest wait | ranks ended after | torchrun after |\n"
    yield "| --- | --- | --- | --- | --- | --- |\n"
    for case in cases:
        row = found[case.name]
        launcher = ""
        if row["ended"] != "finished" and not row["skipped"]:
            launcher = "it was killed" if row.get("launcher_s") is None else f"{row['launcher_s']:.1f} s"
        yield _format_row(case, row | {"ended": "", "share_of_speed": None}, last=launcher)
    yield "\n" + _BEYOND


def _format_row(case: Case, row: dict[str, Any], last: str = "") -> str:
    if row["skipped"]:
        return f"| {case.fault} | not played here: {row['skipped']} | | | | |\n"
    sees = case.sees if row["ended"] != "error" else f"`{row['error']}`: {case.sees}"
    counts = f"{row['missing']}, {row['repeated']}, {row['wrong']}"
    error = "" if row["error_s"] is None else f"{row['error_s']:.1f} s"
    speed = last if row["share_of_speed"] is None else f"{row['share_of_speed']:.2f}"
    failed = f" **{'; '.join(row['failures'])}**" if row["failures"] else ""
    return f"| {case.fault} | {sees}{failed} | {counts} | {row['gap_s']:.1f} s | {error} | {speed} |\n"


def _describe_soak(soak: dict[str, Any]) -> str:
    faults = ", ".join(f"{name} {count} times" for name, count in sorted(soak["faults"].items()))
    resident, allocated = (soak[name] / 2**20 for name in ("growth_bytes", "growth_allocated_bytes"))
    growth = (
        f"{resident:.1f} MiB resident, {allocated:.1f} MiB given out by malloc, "
        f"{soak['growth_threads']} threads beside those that fetch, {soak['growth_descriptors']} descriptors"
    )
    machine = f"{soak['machine']['cores']} cores of {soak['machine']['cpu']}"
    outcome = "; ".join(soak["failures"]) if soak["failures"] else "Every limit held."
    return f"""## A soak

`{soak["command"]}`: random faults for {soak["seconds"] / 60:.0f} minutes on {soak["ranks"]} ranks of torchrun and on
fewer after restarts, drawn from a seed ({soak["date"][:10]}, on {machine}).

| | |
| --- | --- |
| starts of the job | {soak["attempts"]} |
| samples delivered | {soak["delivered"]:,}, of {soak["epochs"]} epochs |
| missing, repeated, wrong | {soak["missing"]}, {soak["repeated"]}, {soak["wrong"]} |
| batches that are not the plan's | {soak["misplaced"]} |
| replayed after kills | {soak["replayed"]:,} |
| requests, tried again | {soak["requests"]:,}, {soak["retries"]:,} |
| longest time without a batch | {soak["gap_s"]:.1f} s |
| growth of a process | {growth} |

Faults: {faults}. {outcome}

"""


def _describe_run(cases: dict[str, Any]) -> str:
    runs = "; ".join(map(_describe_command, [cases, *cases.get("also", [])]))
    return f"""## Make it yourself

```console
python -m devtools faults --list                 # every case, and how the fault is made
python -m devtools faults --only drip cache      # some of them
python -m devtools faults --soak 30m --ranks 3   # random faults
```

These numbers: {runs};
[all of them](../benchmarks/results/faults.json). Cases that mount a small disk, limit a cgroup
or make hosts need root. Clock jumps move Python's clock of the process, not the machine's. Not played: NCCL between
hosts, and stores other than S3.
"""  # fmt: skip


def _describe_command(run: dict[str, Any]) -> str:
    machine = run["machine"]
    load = f" with a load average of {machine['load_1m']:.0f}" if "load_1m" in machine else ""
    return f"`{run['command']}`, {run['date'][:10]}, on {machine['cores']} cores of {machine['cpu']}{load}"
