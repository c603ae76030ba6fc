"""The demo: train on three ranks, lose one to SIGKILL in mid-epoch and the loader's process of another, resume on two.

Every sample is accounted for.

    python examples/demo/run.py                         shards in a local folder
    python examples/demo/run.py --store s3              shards on a real S3 server, started for the demo
    python examples/demo/run.py --store s3://bucket/x   shards in a bucket of yours; credentials as for any S3 client

Exit code 0: the audit is exact and the accuracy is 0.97 or better. 1: it is not. 2: the demo could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import screen
from digits import write_digits
from s3_server import ServerError, run_s3_server

from penstock import PenstockError, audit
from penstock.loader import AuditReport

TRAIN_SCRIPT = Path(__file__).with_name("train.py")
LEAST_ACCURACY = 0.97
STOP_S = 15.0  # what torchrun gets to end its ranks, when the demo is interrupted

Event = dict[str, Any]


@dataclass(kw_only=True)
class Attempt:
    """One torchrun: what its ranks reported. ``kill_to_exit_s`` is the time from the kill to the end of all."""

    world_size: int
    exit_code: int = 0
    start: Event = field(default_factory=dict)
    last_checkpoint: Event | None = None
    kill: Event | None = None
    error: Event | None = None
    end: Event | None = None
    kill_to_exit_s: float = 0.0


class AttemptError(Exception):
    """An attempt did not end as the demo expects."""


def main() -> int:
    options = parse_options()
    # A plain kill of the demo takes down what it started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(KeyboardInterrupt))
    screen.show_title()
    try:
        folder = prepare_folder(options.folder)
        with open_place(options.store, folder) as (url, environment):
            os.environ.update(environment)
            return run_demo(url, folder, options.epochs)
    except KeyboardInterrupt:
        screen.say("Stopped", "interrupted; no process of the demo is left running", style="yellow")
        return 130
    except (PenstockError, ServerError, AttemptError) as exc:
        screen.say("Failed", str(exc), style="red")
        return 2


def run_demo(url: str, folder: Path, epochs: int) -> int:
    train_url, test_url = f"{url}/train", f"{url}/test"
    written = write_digits(train_url, test_url)
    screen.show_data(url, written.train, written.test)

    # After the epoch's first checkpoint and before its second: the batches between are delivered again.
    kill_epoch, kill_step = epochs // 3, 16
    arguments = ["--train", train_url, "--test", test_url, "--output", str(folder / "training"),
                 "--audit", str(folder / "audit"), "--epochs", str(epochs)]  # fmt: skip
    first = run_attempt(3, [*arguments, "--kill", f"1:{kill_epoch}:{kill_step}"], folder / "attempt-1.log", epochs)
    if first.kill is None or first.last_checkpoint is None or first.exit_code == 0:
        raise AttemptError(f"the first attempt was to be killed, and was not; see {folder / 'attempt-1.log'}")
    screen.show_kill(first.kill, first.last_checkpoint, first.kill_to_exit_s)
    kill = f"1:{2 * epochs // 3}:{kill_step}"
    second = run_attempt(2, [*arguments, "--kill-loader", kill], folder / "attempt-2.log", epochs)
    if second.kill is None or second.error is None or second.last_checkpoint is None or second.exit_code == 0:
        raise AttemptError(f"the second attempt was to lose a process, and did not; see {folder / 'attempt-2.log'}")
    screen.show_lost_process(second.kill, second.last_checkpoint, second.error["text"], second.kill_to_exit_s)
    third = run_attempt(2, arguments, folder / "attempt-3.log", epochs)
    if third.end is None or third.exit_code != 0:
        raise AttemptError(f"the third attempt failed; see {folder / 'attempt-3.log'}")

    accuracy = third.end["accuracy"]
    screen.show_result(third.end, sum(written.test), LEAST_ACCURACY)
    samples = sum(written.train)
    audited = screen.show_audit(folder / "audit")
    is_exact = audited == 0 and is_complete(audit(folder / "audit"), epochs, samples)
    screen.show_verdict(is_exact, epochs, samples)
    return 0 if is_exact and accuracy >= LEAST_ACCURACY else 1


def is_complete(report: AuditReport, epochs: int, samples: int) -> bool:
    """Whether every one of ``epochs`` epochs delivered every one of ``samples`` samples, once."""
    return (
        report.is_exact
        and [account.epoch for account in report.epochs] == list(range(epochs))
        and all(account.delivered == account.samples == samples for account in report.epochs)
    )


def run_attempt(world_size: int, arguments: list[str], log: Path, epochs: int) -> Attempt:
    """Run torchrun until it ends, however it ends, with its progress on the screen and its messages in ``log``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
               str(TRAIN_SCRIPT), *arguments]  # fmt: skip
    attempt = Attempt(world_size=world_size)
    killed_s = 0.0
    with (
        log.open("w") as messages,
        run_process(command, messages) as process,
        screen.show_training(world_size, epochs) as show,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            event = parse_event(line)
            match event.get("event"):
                case "start":
                    attempt.start = event
                case "checkpoint":
                    attempt.last_checkpoint = event
                case "kill":
                    attempt.kill = event
                    killed_s = time.monotonic()
                case "error":
                    attempt.error = event
                case "end":
                    attempt.end = event
            show(event)
        attempt.exit_code = process.wait()
    if attempt.kill:
        attempt.kill_to_exit_s = time.monotonic() - killed_s
    return attempt


@contextmanager
def run_process(command: list[str], messages: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session, so that Ctrl-C reaches it only through this program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks and waits for them
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def parse_event(line: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def prepare_folder(folder: Path) -> Path:
    """Create the demo's folder and remove what an earlier run left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("store", "audit", "training"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("attempt-1.log", "attempt-2.log", "attempt-3.log"):
        (folder / name).unlink(missing_ok=True)
    return folder.resolve()


@contextmanager
def open_place(store: str, folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The URL to write the shards to, and the environment with which ranks reach it."""
    if store == "local":
        yield str(folder / "store"), {}
    elif store == "s3":
        with ExitStack() as stack:
            with screen.show_waiting("starting an S3 server (Ceph's gateway)"):
                place = stack.enter_context(run_s3_server())
            yield place
    else:
        yield store.rstrip("/"), {}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="local", help="local (default), s3, or the URL of a prefix to write to")
    parser.add_argument("--folder", type=Path, default=Path("demo-run"), help="folder for checkpoints, audit and logs")
    parser.add_argument("--epochs", type=int, default=12, help="number of epochs, at least 3 (default 12)")
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error(f"--epochs {options.epochs}: must be 3 or more")
    if options.store not in ("local", "s3") and "://" not in options.store:
        parser.error(f"--store {options.store}: must be local, s3, or a URL such as s3://bucket/prefix")
    return options


if __name__ == "__main__":
    sys.exit(main())
