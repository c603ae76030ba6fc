"""Hosts on this machine: network namespaces with a wire between them, and the processes that run there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ..stage import StageError
from .wire import DEVICE, encode_weather

_SUBNET = "10.77.0"


def why_no_hosts() -> str:
    """Explain why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no command `ip` (of iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    name = f"penstock-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made: {made.stderr.strip() or made.stdout.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Hosts:
    """``count`` hosts, each with a device on one network; as a context manager, all is gone at its end.

    Owns the namespaces, the process of the wire and whatever runs in the namespaces. Mutable state: the weather.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"penstock-{os.getpid()}-{number}" for number in range(count)]
        self._wire: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cut: set[tuple[int, int]] = set()
        self._weather: dict[str, Any] = {}

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            command = [sys.executable, "-m", "devtools.faults.hosts.wire", ",".join(self.names)]
            self._wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._wire.stdout is not None
            if self._wire.stdout.readline().strip() != b"ready":
                raise StageError("the wire between the hosts could not be laid; its error stands above")
            for host, name in enumerate(self.names):
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
                _ip("-n", name, "link", "set", DEVICE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts, and the hosts."""
        for host in range(len(self.names)):
            self.kill(host)
        for process in self._processes:
            process.wait()
        if self._wire is not None:
            assert self._wire.stdin is not None
            assert self._wire.stdout is not None
            with suppress(OSError):
                self._wire.stdin.close()
            self._wire.wait()
            self._wire.stdout.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(
        self, host: int, command: Sequence[str], output: IO[bytes] | int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in a session of its own; returns once ``kill`` can find it."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        self._processes.append(process)
        while process.poll() is None and not _is_on(self.names[host], process.pid):
            time.sleep(0.002)
        return process

    def pids(self, host: int) -> list[int]:
        """The processes that run on a host."""
        output = subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False
        ).stdout
        return [int(line) for line in output.split() if is_running(int(line))]

    def kill(self, host: int) -> None:
        """SIGKILL to every process of a host."""
        until = time.monotonic() + 10.0
        while (found := self.pids(host)) and time.monotonic() < until:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    # -- the weather ----------------------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Drop everything to and from a host, silently."""
        others = [other for other in range(len(self.names)) if other != host]
        self._cut |= {(host, other) for other in others} | {(other, host) for other in others}
        self._tell()

    def cut_one_way(self, source: int, target: int) -> None:
        """Drop everything that one host sends to another."""
        self._cut.add((source, target))
        self._tell()

    def mend(self) -> None:
        """All links are whole."""
        self._cut.clear()
        self._tell()

    def set_weather(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Every frame is late, and a share of them is lost."""
        self._weather = {"delay_s": delay_s, "loss": loss}
        self._tell()

    def _tell(self) -> None:
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(encode_weather({**self._weather, "cut": sorted(self._cut)}))
        self._wire.stdin.flush()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StageError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")


def _is_on(name: str, pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").samefile(f"/run/netns/{name}")
    except OSError:  # it has ended
        return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
