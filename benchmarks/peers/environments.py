"""An environment of its own for each peer: its pinned packages, and below them those of the running interpreter.

Torch, numpy and penstock with what that needs are shared by a path file, so that no gigabytes are installed again and
all loaders are measured with the same ones. What a peer needs beside them is installed exactly as its file pins it,
without pip's resolver, so that no peer's wishes meet another's. Environments are kept and reused.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from ...loader.dataset.cache import cache_home
from ...storage.errors import PenstockError
from ...storage.files import lock_file, write_whole
from .catalogue import Peer

_HERE = Path(__file__).parent
_INSTALL_S, _LOCK_S = 900.0, 1200.0
_PATH_FILE = "zz-shared.pth"  # read last
_UNREACHED = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure|ConnectTimeout|Max retries|ProxyError|Network is unreach"
    r"|Connection (refused|reset|aborted|timed out)|ReadTimeout|No matching distribution|Name or service not known"
)


class PeerUnavailableError(PenstockError):
    """A peer cannot be measured here; the message is the reason, fit for a report: no URL, no path of this machine."""


def python_of(peer: Peer, *, root: Path | None = None, say: Callable[[str], None] = lambda text: None) -> str:
    """The interpreter of a peer's environment, which is made if it is not there.

    Raises:
        PeerUnavailableError: it cannot be made, or the peer cannot be imported in it; says why.
    """
    if peer.shared:
        return sys.executable
    pins = _HERE.joinpath(f"{peer.name}.txt").read_text()
    shared = shared_folders()
    folder = (root or cache_home() / "bench-envs") / f"{peer.name}-{_digest(pins, shared)}"
    python = folder / "bin" / "python"
    done = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(folder.with_suffix(".lock"), wait_s=_LOCK_S) as locked:
        if not locked:
            raise PeerUnavailableError("another process has been making its environment for 20 minutes")
        if not done.exists():
            say(f"{peer.name}: installing its pinned packages")
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _make(peer, pins, folder, shared)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            write_whole(done, pins.encode())
    return str(python)


def python_here(peer: Peer) -> str:
    """The running interpreter, if the peer is installed beside penstock. Raises PeerUnavailableError."""
    try:
        found = importlib.util.find_spec(peer.imports.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        extra = ", or 'penstock[bench]'" if peer.package == "webdataset" else ""
        raise PeerUnavailableError(f"it is not installed; pip install {peer.package}{extra}")
    return sys.executable


def shared_folders() -> list[str]:
    """The folders of packages of the running interpreter, in order."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]


def _digest(pins: str, shared: Sequence[str]) -> str:
    key = "\0".join((pins, platform.python_version(), sys.base_prefix, *shared))
    return xxhash.xxh3_64_hexdigest(key.encode())[:12]


def _make(peer: Peer, pins: str, folder: Path, shared: Sequence[str]) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    requirements = folder / "pins.txt"
    requirements.write_text(pins)
    command = [
        sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--no-compile", "--timeout", "20", "--retries", "1", "-r", str(requirements),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    _run(command, environment, peer, "be installed")
    # Written last: pip would take what is shared for installed. ``addsitedir`` reads the path files there, too.
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    packages = next(folder.glob("lib/python*/site-packages"))
    packages.joinpath(_PATH_FILE).write_text("\n".join(lines) + "\n")
    code = f"from penstock.benchmarks.contenders import find_module; find_module({peer.name!r})"
    _run([str(python), "-W", "ignore", "-c", code], dict(os.environ), peer, "be imported")


def _run(command: Sequence[str], environment: dict[str, str], peer: Peer, what: str) -> None:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise PeerUnavailableError(f"it could not {what} within {_INSTALL_S / 60:.0f} minutes") from exc
    if done.returncode:
        raise PeerUnavailableError(f"it could not {what}: {reason_of(done.stdout + done.stderr, peer)}")


def reason_of(log: str, peer: Peer) -> str:
    """Explain why pip or an import failed, in a sentence without URLs, hosts and paths."""
    if "No module named pip" in log:
        return "pip is missing here; python -m ensurepip installs it"
    errors = [line for line in log.splitlines() if re.match(r"ERROR|\w*Error\b|.*Error: ", line.strip())]
    if _UNREACHED.search(log):
        return (
            "the package index cannot be reached, or lacks a package that its pins name; install it once while "
            f"online, or beside penstock (pip install {peer.package}), and add --environments here"
        )
    return clean(errors[-1] if errors else (log.strip().splitlines() or ["it gave no reason"])[-1])


def clean(text: str) -> str:
    """A line without URLs, host names that pip prints, and paths of this machine."""
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "(a URL)", " ".join(text.split()))
    text = re.sub(r"host='[^']*'", "host=(the index)", text)
    return re.sub(r"(?<![\w.])(?:~|/[\w.@+-]+){1}(?:/[\w.@+-]+)+", "(a file)", text)
