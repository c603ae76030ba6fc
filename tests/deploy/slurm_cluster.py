"""A real Slurm of two nodes on this machine, on loopback alone: a controller, and a daemon for each node."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from free_port import free_port
from missing_server import skip_or_fail_in_ci

NODES = ("n1", "n2")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"  # where daemons are, of which not every user's PATH knows
# No plugin that needs munge, cgroups or a real GPU. Processes are followed by their parents, so that a signal reaches
# all of a step, as with cgroups.
CONFIGURATION = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
ReturnToService=2
SlurmdTimeout=5
KillWait=5
KillOnBadExit=1
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """Its daemons' and jobs' processes are those whose environment names its configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.naming = {"SLURM_CONF": f"{folder}/slurm.conf"}
        for name in ("state", *NODES):
            (folder / name).mkdir()
        ports = [free_port() for _ in range(3)]
        rendezvous = free_port()  # the batch file derives it from the job's number
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=folder,
            controller_port=ports[0],
            n1_port=ports[1],
            n2_port=ports[2],
            first_job=rendezvous - 10_000,
        )
        (folder / "slurm.conf").write_text(text)
        # Slurm counts the files, and nobody opens them.
        (folder / "gpu0").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu0\n")

    def start(self) -> None:
        self._start_daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_for("two idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle")

    def start_node(self, node: str) -> None:
        self._start_daemon("slurmd", "-D", "-N", node, TEST_NODE=node)

    def _start_daemon(self, *command: str, **environment: str) -> None:
        log = (self.folder / f"{'-'.join(command)}.out").open("ab")
        with log:
            environment = {**os.environ, **self.naming, "PATH": SEARCHED, **environment}
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._daemons.append(daemon)

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints; nothing where it fails, as while the controller starts."""
        environment = {**os.environ, **self.naming}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def processes(self, *words: str) -> list[int]:
        """Those of this cluster whose environment has one of the given words, or all."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                own = set(path.read_bytes().decode(errors="replace").split("\0"))
                if f"SLURM_CONF={self.naming['SLURM_CONF']}" in own and (not words or own & set(words)):
                    found.append(int(path.parent.name))
        return found

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's daemon and to all that it started."""
        kill_all(self.processes(f"TEST_NODE={node}", f"SLURMD_NODENAME={node}"))

    def stop(self) -> None:
        while left := self.processes():  # one that was forked meanwhile is found the next time
            kill_all(left)
            time.sleep(0.05)
        for daemon in self._daemons:
            daemon.wait(30)

    def wait_for(self, what: str, condition: Callable[[], bool], *, more: Callable[[], str] = str) -> None:
        """Fails with the daemons' logs, and what ``more`` returns, where it does not happen."""
        deadline_s = time.monotonic() + 120.0
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen\n{self._read_logs()}\n{more()[-6000:]}"
            time.sleep(0.2)

    def _read_logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


def kill_all(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def need_slurm() -> None:
    """Skip where Slurm is not installed; in CI, fail."""
    lacking = [name for name in ("slurmctld", "slurmd", "srun") if not shutil.which(name, path=SEARCHED)]
    if not lacking:
        return
    skip_or_fail_in_ci(f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client")


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def write_torchrun(folder: Path, text: str) -> str:
    """A PATH on which ``torchrun`` is this shell script."""
    (folder / "bin").mkdir()
    (folder / "bin" / "torchrun").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / "torchrun").chmod(0o755)
    return f"{folder}/bin:{os.environ['PATH']}"
