"""Run the RayJob's command on a Ray cluster of two nodes of this machine, kill one in mid-run, and audit every sample.

The command is that of deploy/kubernetes/rayjob.yaml, with two workers without GPUs, folders of this machine and the
shipped recipe `digits`. Each node is a `ray start` with room for one worker. Once the ranks have trained for some
steps, all processes of the second node get SIGKILL, and another node comes, as KubeRay would start another pod. It ends
with 1 if the run does not come to its end, did not begin again, or the audit finds a sample missing or doubled.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .arguments import make_parser

ROOT = Path(__file__).resolve().parents[1]
_TRIES = 6
_MARK = "PENSTOCK_RAY_NODE"
RAYJOB = ROOT / "deploy" / "kubernetes" / "rayjob.yaml"


def command_of(manifest: str, place: Path, *, epochs: int) -> list[str]:
    """The entrypoint of the RayJob as it runs here: this interpreter, two workers on CPUs, folders below ``place``.

    Raises:
        ValueError: the manifest has no such entrypoint.
    """
    found = re.search(r"entrypoint: >-\n((?: +.*\n)+?)(?=  \w)", manifest)
    if found is None:
        raise ValueError("the manifest has no entrypoint")
    words = shlex.split(found[1])
    options = iter(words)
    out: list[str] = []
    for word in options:
        if word == "python":
            out.append(sys.executable)
        elif word.endswith("/ray_train.py"):
            out.append(str(ROOT / "deploy" / "ray" / "train.py"))
        elif word == "--workers":
            next(options)
            out += [word, "2"]
        elif word == "--storage":
            next(options)
            out += [word, str(place / "ray")]
        elif word == "--gpus":
            continue
        elif word.endswith("recipe.toml"):
            out += ["digits", f"--trainer.output_dir={place / 'run'}", f"--trainer.epochs={epochs}"]
            out += ["--trainer.checkpoint.every_steps=20", "--trainer.report.every=5"]
            out += [f"--data.args.audit_dir={place / 'audit'}"]
        else:
            out.append(word)
    return out


@contextmanager
def node(place: Path, *options: str) -> Iterator[Node]:
    """A `ray start` with room for one worker; all its processes are killed at the end of the block."""
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", "--num-cpus=1",
        "--node-ip-address=127.0.0.1", "--object-store-memory=100000000",
        f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}", *options,
    ]  # fmt: skip
    name = uuid.uuid4().hex
    with Path(place, "nodes.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=place, env=environment() | {_MARK: name}, stdout=log, stderr=log)
    started = Node(name=name, process=process)
    try:
        yield started
    finally:
        started.kill()


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node: its `ray start`, and a name that all processes below it have in their environment."""

    name: str
    process: subprocess.Popen[bytes]

    def kill(self) -> int:
        """Kill all processes of the node, also those whose parents are gone; says how many."""
        mark = f"{_MARK}={self.name}\0".encode()
        count = 0
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    count += 1
            except OSError:  # it has ended, or is another user's
                continue
        self.process.wait()
        return count


def environment() -> dict[str, str]:
    """Of Ray's processes: no token in the user's home, and no killer of processes where memory is short."""
    given = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **given}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def add_node(stack: ExitStack, place: Path, address: str, count: int, *options: str) -> Node:
    """Start a node and wait until so many are alive; on a busy machine `ray start` gives up early, and is tried again.

    Raises:
        TimeoutError: it did not start in several tries.
    """
    for _ in range(_TRIES):
        started = stack.enter_context(node(place, *options))
        while started.process.poll() is None:
            if nodes_alive(address) >= count:
                return started
            time.sleep(1)
        started.kill()
    raise TimeoutError(f"a node did not start in {_TRIES} tries")


def nodes_alive(address: str) -> int:
    """Count the nodes of the cluster that are alive; 0 if it does not answer."""
    program = (
        "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
        "print(sum(one['Alive'] for one in ray.nodes()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, address],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def steps_done(run: Path) -> int:
    """The step of the newest record of a run; 0 without one."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def show(place: Path, *, epochs: int, kill_at: int) -> bool:
    """Run it and print what happens; True if all is as it should be."""
    from penstock.loader import audit

    port = free_port()
    address = f"127.0.0.1:{port}"
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    with ExitStack() as stack:
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={place / 't'}"]
        add_node(stack, place, address, 1, *head)
        second = add_node(stack, place, address, 2, f"--address={address}")
        command = command_of(RAYJOB.read_text(), place, epochs=epochs)
        say(f"two nodes; {shlex.join(['python', *command[1:]])}")
        with Path(place, "job.log").open("wb") as log:
            job = subprocess.Popen(
                command, cwd=place, env={**environment(), "RAY_ADDRESS": address}, stdout=log, stderr=log
            )
        try:
            while steps_done(place / "run") < kill_at:
                if job.poll() is not None:
                    raise RuntimeError(f"the run ended with {job.returncode} before the kill")
                time.sleep(0.2)
            step, killed = steps_done(place / "run"), second.kill()
            say(f"SIGKILL of the second node's raylet and all its processes ({killed} processes) at step {step}")
            add_node(stack, place, address, 2, f"--address={address}")
            say("another node has come")
            code = job.wait(900)
        finally:
            job.kill()
            job.wait()
        say(f"the run ended with {code} at step {steps_done(place / 'run')}")
    records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    resumed = [record["step"] for record in records if record["kind"] == "resume"]
    report = audit(place / "audit")
    replayed = sum(epoch.replayed for epoch in report.epochs)
    delivered = sum(epoch.delivered for epoch in report.epochs)
    counted = "each counted exactly once" if report.is_exact else "NOT each counted once"
    say(f"resumed at step {', '.join(map(str, resumed)) or 'none'}; {len(report.epochs)} epochs")
    say(f"{delivered:,} samples delivered, {replayed:,} of them again, {counted}")
    return code == 0 and bool(resumed) and report.is_exact and len(report.epochs) == epochs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=8, help="of the recipe (8)")
    parser.add_argument("--kill-at", type=int, default=50, help="step after which the node is killed (50)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # short: it holds sockets
        try:
            is_good = show(Path(place), epochs=given.epochs, kill_at=given.kill_at)
        except Exception:
            for name in ("nodes.log", "job.log"):
                log = Path(place, name)
                print(f"--- {name}", *log.read_text().splitlines()[-30:] if log.exists() else (), sep="\n")
            raise
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
