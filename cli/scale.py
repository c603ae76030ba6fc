"""``penstock scale``: more or fewer workers and shards for a training run that goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..loader.errors import ConfigError
from ..trainer.errors import TrainerError
from ..trainer.report.status.rank_status import FOLDER
from ..trainer.report.status.scaling import Answer, Wanted, ask_to_scale, read_answer, withdraw_request
from ..trainer.report.status.servers import FINAL, read_servers
from .common import Flag, format_count, local_path, parse, print_json

_PATIENCE_S = 120.0  # for a run to notice the request: it may be waiting for a process that starts anew
_GRACE_S = 3.0  # for one that says that it has ended, and may be starting again
_GLANCE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """Give a run over a parameter server other numbers of workers and shards, while it trains.

    New shards take their share of the values from the others, and those that go hand theirs on first; workers that go
    finish the batch that they are training on. No push is lost or counted twice, and every batch counts once. It
    returns once all is done. On a Ray cluster, each more takes a CPU.

    example:  penstock scale runs/clicks --shards 3 --workers 6
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
    """The output_dir of the run."""

    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """How many workers the run is to have; as it is where left out."""

    shards: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """How many shards the run is to have; as it is where left out."""

    json: Flag = False
    """Print the numbers as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(ScaleArguments, "scale", arguments)
    folder = local_path(given.run, "RUN")
    if given.workers is None and given.shards is None:
        raise ConfigError("give --workers or --shards, or both: the numbers that the run is to have")
    for name, count in (("workers", given.workers), ("shards", given.shards)):
        if count is not None and count < 1:
            raise ConfigError(f"--{name} {count} must be 1 or more")
    if not (folder / FOLDER).is_dir():
        raise TrainerError(
            f"{folder} is not the output_dir of a run that trains; give that of one over a parameter server"
        )
    wanted = ask_to_scale(folder, workers=given.workers, shards=given.shards)
    try:
        answer = _wait(folder, wanted)
    except KeyboardInterrupt:
        withdraw_request(folder)
        raise
    if given.json:
        print_json({"workers": answer.workers, "shards": answer.shards})
    else:
        print(f"{format_count(answer.workers, 'worker')} over {format_count(answer.shards, 'shard')}")
    return 0


def _wait(folder: Path, wanted: Wanted) -> Answer:
    """Wait until a request is done.

    Raises:
        TrainerError: it refuses, or gives no answer.
    """
    asked_s = time.monotonic()
    while True:
        answer = read_answer(folder, wanted)
        status = read_servers(folder)
        patience_s = _GRACE_S if status is not None and status.state in FINAL else _PATIENCE_S
        if answer is None and time.monotonic() - asked_s > patience_s:
            withdraw_request(folder)
            raise TrainerError(
                f"no run in {folder} has answered for {patience_s:.0f} s: it has ended, hangs, or is not over a "
                "parameter server; look at it with penstock top"
            )
        if answer is not None and answer.progress == "refused":
            raise TrainerError(answer.reason)
        if answer is not None and answer.progress == "done":
            return answer
        time.sleep(_GLANCE_S)
