"""Run the RayJob's command on a Ray cluster of two nodes of this machine, kill one in mid-run, and audit every sample.

The command is that of deploy/kubernetes/rayjob.yaml, with two workers without GPUs, folders of this machine and the
shipped recipe `digits`. Each node is a `ray start` with room for one worker. Once the ranks have trained for some
steps, the second node's raylet and all below it get SIGKILL, and another node comes, as KubeRay would start another
pod. It ends with 1 if the run does not come to its end, did not begin again, or the audit finds a sample missing or
doubled.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
def node(place: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `ray start` with room for one worker; all its processes are killed at the end of the block."""
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", "--num-cpus=1",
        "--node-ip-address=127.0.0.1", "--object-store-memory=100000000",
        f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}", *options,
    ]  # fmt: skip
    with Path(place, "nodes.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=place, env=environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        kill_below(process.pid)
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """Of Ray's processes: no token in the user's home, and no killer of processes where memory is short."""
    given = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **given}


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    try:
        children = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [found for child in children for found in (child, *below(child))]


def kill_below(pid: int) -> int:
    """Kill all that a process has started; says how many."""
    found = below(pid)
    for one in found:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for_nodes(address: str, count: int, timeout_s: float = 120.0) -> None:
    """Wait until so many nodes are alive.

    Raises:
        TimeoutError: they are not in time.
    """
    program = (
        "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
        "print(sum(one['Alive'] for one in ray.nodes()))"
    )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, address],
            env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0 and int(done.stdout.split()[-1]) >= count:
            return
        time.sleep(1)
    raise TimeoutError(f"there are not {count} nodes at {address} after {timeout_s:.0f} s")


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
        stack.enter_context(node(place, *head))
        wait_for_nodes(address, 1)
        second = stack.enter_context(node(place, f"--address={address}"))
        wait_for_nodes(address, 2)
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
            step, killed = steps_done(place / "run"), kill_below(second.pid)
            say(f"SIGKILL of the second node's raylet and all below it ({killed} processes) at step {step}")
            stack.enter_context(node(place, f"--address={address}"))
            code = job.wait(600)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
