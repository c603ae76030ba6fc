"""``penstock state``: show a saved state of a loader, or move it on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from ..loader.errors import ConfigError
from ..loader.order.selecting import Subset
from ..loader.order.state import LoaderState
from ..storage.suggestions import did_you_mean
from ..tools.state_file import StateFile, count_epoch, read_state_file, skip_in_state, write_state_file
from .common import Flag, OptionalNumber, local_path, parse, print_json
from .screen import console, fact_table

FileName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
_USAGE = """\
usage: penstock state show FILE [--json]
       penstock state skip FILE --batches N --global-batch-size G | --samples N

  show   say in words where a saved state of a loader stands
  skip   move it on, or back with a negative number, and write the file anew

FILE is JSON that holds what loader.state_dict() returned, alone or inside other
JSON. `show` also takes a checkpoint of the trainer (a folder step-N).

  example:  penstock state show loader.json

  example:  penstock state skip loader.json --samples 4096

`penstock state show --help` and `penstock state skip --help` tell the options.
"""


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """Say where a saved state of a loader stands: data set, order, epoch, and how much of the epoch is consumed.

    FILE is JSON with what loader.state_dict() returned, alone or inside other JSON, or a checkpoint of the trainer (a
    folder step-N). A state knows no ranks and no batch size, so it shows none.

    example:  penstock state show runs/gpt/loader.json
    """

    file: FileName
    """JSON file with a state, or a trainer's checkpoint."""

    json: Flag = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class SkipArguments:
    """Move a saved state on, so that the run that loads it leaves samples out; or back, with a negative number.

    The file is replaced as a whole or not at all. A state holds no batch size: --batches needs --global-batch-size,
    the samples of all ranks together. A step further than an epoch's end goes on in the next epoch; back goes to the
    epoch's beginning at most. An audit counts what was left out so as missing; a loader's skip_batches(n), in a
    program, as skipped.

    example:  penstock state skip loader.json --batches 200 --global-batch-size 1024

    example:  penstock state skip loader.json --samples -4096
    """

    file: FileName
    """JSON file with a state."""

    batches: OptionalNumber = None
    """Global batches to move on; below 0 back."""

    samples: OptionalNumber = None
    """Samples to move on instead; below 0 back."""

    global_batch_size: OptionalNumber = None
    """Samples in a global batch, with --batches."""

    last_batch: Literal["drop", "pad", "partial"] = "drop"
    """What the run does with samples that do not fill a batch, with --batches."""

    dry_run: Flag = False
    """Only show where the state would be."""

    json: Flag = False
    """Print the result as JSON."""


def run(arguments: Sequence[str]) -> int:
    commands = {"show": _show, "skip": _skip}
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0)
    if name not in commands:
        meant = did_you_mean(name, commands) if name else ""
        problem = f"penstock state: no command {name!r}{meant}" if name else "penstock state: show or skip?"
        print(f"{problem}\n\n{_USAGE}", end="", file=sys.stderr)
        return 2
    commands[name](rest)
    return 0


def _show(arguments: Sequence[str]) -> None:
    given = parse(ShowArguments, "state show", arguments)
    file = read_state_file(local_path(given.file, "FILE"))
    if given.json:
        print_json(_plain(file, file.state))
    else:
        _report(file, file.state, "")


def _skip(arguments: Sequence[str]) -> None:
    given = parse(SkipArguments, "state skip", arguments)
    if given.batches is None and given.samples is None:
        raise ConfigError("give --batches N with --global-batch-size G, or --samples N")
    if (given.batches is None) != (given.global_batch_size is None):
        raise ConfigError("--batches and --global-batch-size go together; a state knows no batch size")
    file = read_state_file(local_path(given.file, "FILE"))
    moved = skip_in_state(
        file.state,
        samples=given.samples,
        batches=given.batches,
        size=1 if given.global_batch_size is None else given.global_batch_size,
        last_batch=given.last_batch,
    )
    if not given.dry_run:
        write_state_file(file, moved)
    if given.json:
        print_json({"before": _plain(file, file.state), "after": _plain(file, moved), "written": not given.dry_run})
        return
    _report(file, moved, f"epoch {file.state.epoch:,}, {file.state.consumed:,} samples consumed")
    console().print()
    console().print("not written: --dry-run" if given.dry_run else f"written: {file.path}")


def _plain(file: StateFile, state: LoaderState) -> dict[str, Any]:
    return {"file": str(file.path), "epoch_samples": count_epoch(state), **state.to_dict()}


def _report(file: StateFile, state: LoaderState, before: str) -> None:
    total = count_epoch(state)
    share = state.consumed / max(1, total)
    screen, facts = console(), fact_table()
    at = ", ".join(".".join(map(str, place)) for place in file.places)
    facts.add_row("file", f"{file.path}{f', at {at}' if at else ''}")
    facts.add_row("version", str(state.to_dict()["version"]))
    facts.add_row("data set", f"{state.fingerprint}, {state.num_samples:,} samples")
    if before:
        facts.add_row("was", before)
    facts.add_row("epoch", f"{state.epoch:,}, counted from 0")
    facts.add_row("consumed", f"{state.consumed:,} of the epoch's {total:,} samples ({share:.1%})")
    order = state.order
    kind = "shuffled" if order.shuffle else "in the manifest's order"
    unit = {0: "chunks", 1: "single rows"}.get(order.piece, f"pieces of {order.piece:,} rows")
    facts.add_row("order", f"{kind}, seed {order.seed}; {order.lanes:,} lanes, windows of {order.window:,} {unit}")
    if "subset" in state.selection:
        facts.add_row("subset", str(Subset(**state.selection["subset"])))
    if "weights" in state.selection:
        facts.add_row("weights", f"drawn by weights {state.selection['weights']}")
    if state.bucket:
        run, pool = (state.bucket[name] * order.lanes for name in ("run", "pool"))
        facts.add_row("bucket", f"by {state.bucket['index']}, runs of {run:,} in pools of {pool:,} samples")
    screen.print(facts)
    screen.print()
    epochs = state.epoch + share
    screen.print(f"A loader that loads it continues after {epochs:,.3f} epochs, on any number of ranks.")
