"""Limits of this process, cores and memory; and sizes as people write them."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from pathlib import Path, PurePosixPath

from .errors import ConfigError

_HIERARCHIES = ("cgroup2", "cgroup")  # the filesystems of version 2 and of version 1
_MOUNT = r"^\d+ \d+ \S+ (\S+) (\S+) .*? - (\S+) \S+ (\S+)$"  # root, mount point, filesystem, its options
_USUAL_MOUNT = PurePosixPath("/sys/fs/cgroup")


def can_start_python() -> bool:
    """Return whether ``sys.executable`` is a Python: an application that Python is part of would be started again."""
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


def parse_bytes(value: int | float | str, name: str) -> int:
    """Read a number of bytes from a number or from text such as '512MiB', '2GB', '1.5 GiB'.

    Raises:
        ConfigError: it is neither, or less than one byte. Names ``name`` and the value.
    """
    if isinstance(value, str):
        from ..storage.sizes import read_size

        size = read_size(value)
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        size = None
    else:
        size = float(value)
    if size is None:
        raise ConfigError(f"{name}={value!r} is not a size; write bytes as a number, or like '512MiB' or '2GB'")
    if not 1 <= size < float("inf"):
        raise ConfigError(f"{name}={value!r}: must be at least 1 byte")
    return int(size)


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may run on: its affinity, limited by the CPU quotas of its cgroup and all ancestors.

    ``root`` is the folder that ``proc`` and the mount points lie in.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _own_cgroups(root, "cpu"):
        quota = _read(folder / "cpu.max").split()
        if not quota:
            quota = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        # "max" (version 2) and -1 (version 1) set no quota.
        if len(quota) == 2 and all(number.isdecimal() and int(number) for number in quota):
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, int(cores))


def usable_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process and its siblings may use: the machine's, limited like the cores.

    ``memory.high`` counts too: above it the kernel slows a process down as if memory were short.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _own_cgroups(root, "memory"):
        limits = [_read(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        if limits[-1]:
            # Version 1 counts in ancestors here that a container does not see. Version 2, which has no such line, would
            # first sum up its counters of all cores.
            limits += re.findall(r"^hierarchical_memory_limit (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        total = min([total, *(int(limit) for limit in limits if limit.isdecimal())])
    return total


@lru_cache(8)
def list_cgroups(controller: str, own: str, mounts: str) -> tuple[PurePosixPath, ...]:
    """The folders of a process's cgroup and all its visible ancestors, of version 2 and of version 1's ``controller``.

    ``own`` and ``mounts`` are the contents of the process's ``/proc/self/cgroup`` and ``/proc/self/mountinfo``.

    A mount shows a hierarchy from its own root down: in a container often from the container's group, while ``own``
    may count from the host's. Where no mount shows the process's group, each mount point is taken for it.
    """
    paths = {}
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (number == "0" and not names) or controller in names.split(","):
            paths["cgroup" if names else "cgroup2"] = PurePosixPath(path)
    folders: list[PurePosixPath] = []
    for kind in _HIERARCHIES:
        found = _find_mounts(kind, controller, mounts)
        group = paths.get(kind, PurePosixPath("/"))
        shown = [(top, at) for top, at in found if group.is_relative_to(top) and ".." not in group.parts]
        for top, at in shown:
            inside = group.relative_to(top)
            folders += [at / ancestor for ancestor in (inside, *inside.parents)]
        if not shown:
            folders += [at for _, at in found]
    return tuple(dict.fromkeys(folders))


def _find_mounts(kind: str, controller: str, mounts: str) -> list[tuple[PurePosixPath, PurePosixPath]]:
    """(root, mount point) of each mount of a hierarchy; proc(5) describes the lines."""
    found = []
    for top, at, mounted, options in re.findall(_MOUNT, mounts, re.MULTILINE):
        if mounted == kind and (kind == "cgroup2" or controller in options.split(",")):
            found.append((PurePosixPath(_unescape(top)), PurePosixPath(_unescape(at))))
    return found


def _unescape(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), name)


def _own_cgroups(root: Path, controller: str) -> list[Path]:
    own, mounts = _read(root / "proc/self/cgroup"), _read(root / "proc/self/mountinfo")
    folders = list_cgroups(controller, own, mounts) or (_USUAL_MOUNT, _USUAL_MOUNT / controller)
    return [root / folder.relative_to("/") for folder in folders]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""
