"""The demo of a parameter server on Ray: of three workers and two shards one each is killed, and the coordinator.

    python examples/demo/ray_run.py

Workers lease batches of handwritten digits and push gradients to the shards, each at its own pace. Ray and the driver
replace what is killed, and training goes on; in the end every batch counted once.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import screen

from penstock import PenstockError, audit

WORKERS, SHARDS = 3, 2
LEAST_ACCURACY = 0.97
POLL_S = 0.5
STOP_S = 60.0  # what the driver gets to save and to end all, when the demo is interrupted

Standing = dict[str, Any]


class DemoError(Exception):
    """The run did not go as the demo expects."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A process to kill once a share of the batches counts."""

    name: str
    at: float


VICTIMS = (Victim(name="worker-001", at=0.2), Victim(name="shard-1", at=0.4), Victim(name="coordinator", at=0.6))


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(KeyboardInterrupt))
    screen.show_title("workers, a shard and the coordinator are killed, every batch counts once")
    try:
        return run_demo(options.folder, options.epochs)
    except KeyboardInterrupt:
        screen.say("Stopped", "interrupted; no process of the demo is left running", style="yellow")
        return 130
    except (PenstockError, DemoError) as exc:
        screen.say("Failed", str(exc), style="red")
        return 2


def run_demo(folder: Path, epochs: int) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "training.log"
    output = folder / "training"
    data, held_out, logs = folder / "data" / "train", folder / "data" / "test", folder / "audit"
    command = [sys.executable, "-m", "penstock.trainer", "digits", "--ray", f"--workers={WORKERS}",
               f"--shards={SHARDS}", "--trainer.parallel.mode=parameter_server", "--trainer.server.replicas=2",
               f"--trainer.epochs={epochs}", f"--trainer.output_dir={output}", f"--data.args.source={data}",
               f"--evaluation.data.args.source={held_out}", f"--data.args.audit_dir={logs}"]  # fmt: skip
    screen.say("train", f"penstock.trainer [bold]digits --ray --workers {WORKERS} --shards {SHARDS}[/]")
    with log.open("w") as messages, run_process(command, messages) as process:
        last = watch(process, output / "ranks" / "servers.json")
        code = process.wait()
    if code or last.get("state") != "ended":
        raise DemoError(f"training ended with {code}; its messages are in {log}")
    accuracy = last["metrics"]["accuracy"]
    is_enough = accuracy >= LEAST_ACCURACY
    screen.say("result", f"accuracy [bold]{accuracy:.4f}[/] on held-out digits", style="green" if is_enough else "red")
    code = screen.show_audit(logs)
    report = audit(logs)
    is_exact = code == 0 and report.is_exact and len(report.epochs) == epochs
    if is_exact:
        screen.say("exact", f"every batch of {epochs} epochs counted once", style="green")
    else:
        screen.say("not exact", f"some epoch of {epochs} is not as it should be", style="red")
    return 0 if is_exact and is_enough else 1


def watch(process: subprocess.Popen[bytes], path: Path) -> Standing:
    """Show how the run goes and kill the victims, until the process ends; returns the last that it told of itself."""
    left = list(VICTIMS)
    pids: dict[str, int] = {}
    standing: Standing = {}
    with screen.show_batches() as show:
        while process.poll() is None:
            time.sleep(POLL_S)
            with suppress(OSError, ValueError):
                standing = json.loads(path.read_bytes())
            if not standing or not standing["total_batches"]:
                continue
            show(standing)
            note_starts(standing, pids)
            if left and standing["batches"] >= left[0].at * standing["total_batches"]:
                victim = left.pop(0)
                pid = find_pid(standing, victim.name)
                os.kill(pid, signal.SIGKILL)
                where = f"after {standing['batches']:,} of {standing['total_batches']:,} batches"
                screen.say("SIGKILL", f"[bold]kill -9[/] of {victim.name} (pid {pid}) {where}", style="red")
    if left:
        raise DemoError(f"the run ended before {left[0].name} was killed; its messages are beside {path.parents[1]}")
    with suppress(OSError, ValueError):
        standing = json.loads(path.read_bytes())
    note_starts(standing, pids)
    return standing


def find_pid(standing: Standing, name: str) -> int:
    if name == "coordinator":
        return int(standing["coordinator_pid"])
    return next(int(one["pid"]) for one in (*standing["shards"], *standing["workers"]) if one["name"] == name)


def note_starts(standing: Standing, pids: dict[str, int]) -> None:
    """Tell of each process that took the place of one that was killed."""
    found = {one["name"]: int(one["pid"]) for one in (*standing["shards"], *standing["workers"])}
    found["coordinator"] = int(standing["coordinator_pid"])
    for name, pid in found.items():
        if not pid:
            continue
        if pids.get(name, pid) != pid:
            screen.say("", f"{name} is back (pid {pid}), at {standing['batches']:,} batches")
        pids[name] = pid


@contextmanager
def run_process(command: list[str], messages: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in its own session, so that Ctrl-C reaches it only through this program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=messages, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-run/ray"), help="everything that is written")
    parser.add_argument("--epochs", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
