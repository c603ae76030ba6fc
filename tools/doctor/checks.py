"""From facts to findings: what is well, what will be slow, what will fail, and how to mend it. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .facts import GpuFacts, MachineFacts, RankFacts, SpaceFacts, StoreFacts

Level = Literal["ok", "warn", "fail"]

_MIB, _GIB = 1 << 20, 1 << 30
_FEW_FILES, _TOO_FEW_FILES = 1024, 256  # Linux's usual limit; sockets, shards and libraries need some hundred
_FEW_INODES = 1000
_SMALL_SHM, _TINY_SHM = _GIB, 128 * _MIB  # a container's default is 64 MiB, too little for NCCL's buffers
_SMALL_DISK, _TINY_DISK = _GIB, 100 * _MIB
_SMALL_MEMORY, _TINY_MEMORY = 2 * _GIB, 512 * _MIB  # for each rank
_SKEW_REFUSED_S = 900.0  # S3 refuses signatures that are older or newer
_SKEW_DOUBTFUL_S = 60.0
_SPREAD_DOUBTFUL_S = 5.0  # attempts of a run are ordered by the hosts' clocks
_SLOW_LATENCY_S, _SLOW_BYTES_PER_S = 0.01, 100e6
_SLOW_STORE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis: ``mend`` says what to do, and is empty where all is well."""

    check: str
    level: Level
    found: str
    mend: str = ""


def diagnose(facts: MachineFacts) -> list[Finding]:
    """Judge everything that is known of a machine, in the order in which a reader should mend it."""
    findings = [
        _python(facts),
        *_libraries(facts),
        _gpus(facts.gpus),
        _cores(facts),
        _memory(facts),
        _open_files(facts),
    ]
    findings += [
        _shm(facts),
        _space("/tmp", facts.tmp, "set TMPDIR to a folder on a disk with room"),
        _space("cache", facts.cache, "set PENSTOCK_CACHE, or give cache_dir=, on a disk with room"),
    ]
    if facts.store is not None:
        findings += [_store(facts.store), _clock(facts.store)]
    if facts.ranks is not None:
        findings += list(_ranks(facts.ranks))
    return findings


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among findings; ``ok`` of none."""
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.13.0rc1+cpu`` -> (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def is_older(version: str, least: str) -> bool:
    """Tell whether a version comes before another; trailing zeros count for nothing."""
    one, other = release(version), release(least)
    width = max(len(one), len(other))
    return one + (0,) * (width - len(one)) < other + (0,) * (width - len(other))


def _python(facts: MachineFacts) -> Finding:
    newest, oldest = facts.tested_pythons[-1], facts.tested_pythons[0]
    if is_older(facts.python, oldest):
        return Finding(check="python", level="fail", found=facts.python, mend=f"install Python {oldest} to {newest}")
    if is_older(newest, ".".join(facts.python.split(".")[:2])):
        return Finding(
            check="python",
            level="warn",
            found=f"{facts.python}, newer than all that are tested",
            mend=f"tested are {oldest} to {newest}; some extras may have no wheels here",
        )
    return Finding(check="python", level="ok", found=facts.python)


def _libraries(facts: MachineFacts) -> Iterator[Finding]:
    old, fine = [], []
    for library in facts.libraries:
        if library.found is None:
            if not library.extra:
                yield Finding(
                    check=library.name,
                    level="fail",
                    found=f"not installed; at least {library.least} is needed",
                    mend=f"pip install '{library.name}>={library.least}'",
                )
        elif is_older(library.found, library.least):
            old.append(library)
        elif not library.extra:
            fine.append(f"{library.name} {library.found}")
    for library in old:
        use = f" by penstock[{library.extra}]" if library.extra else ""
        yield Finding(
            check=library.name,
            level="warn" if library.extra else "fail",
            found=f"{library.found}; at least {library.least} is needed{use}",
            mend=f"pip install --upgrade '{library.name}>={library.least}'",
        )
    if fine:
        yield Finding(check="libraries", level="ok", found=", ".join(fine))


def _gpus(gpus: GpuFacts) -> Finding:
    def finding(level: Level, found: str, mend: str = "") -> Finding:
        return Finding(check="cuda", level=level, found=found, mend=mend)

    devices = f"{gpus.present} GPU{'s' * (gpus.present != 1)}"
    if gpus.problem:
        return finding("fail", gpus.problem, "reinstall torch for this machine; `python -c 'import torch'` must work")
    if not gpus.present and not gpus.usable:
        if gpus.torch_cuda is None:
            return finding("ok", "no GPU, and a torch for CPUs")
        return finding(
            "warn",
            f"no GPU, but a torch for CUDA {gpus.torch_cuda}",
            "on a machine with GPUs: start the container with them (docker run --gpus all; on Kubernetes the limit "
            "nvidia.com/gpu)",
        )
    if gpus.torch_cuda is None:
        return finding(
            "fail", f"{devices}, but a torch for CPUs", "install the torch for your driver's CUDA (see pytorch.org)"
        )
    if not gpus.usable and gpus.is_hidden:
        return finding("warn", f"{devices}, hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES to use them")
    if not gpus.usable:
        return finding(
            "fail",
            f"{devices}, of which torch for CUDA {gpus.torch_cuda} can use none",
            "update the driver (`nvidia-smi` shows the newest CUDA that it knows), or install a torch for an older one",
        )
    return finding("ok", f"{gpus.usable} of {max(gpus.present, gpus.usable)} GPUs, CUDA {gpus.torch_cuda}")


def _cores(facts: MachineFacts) -> Finding:
    nodes = f"; {facts.numa_nodes} NUMA nodes" if facts.numa_nodes > 1 else ""
    found = f"{facts.cores} of the machine's {facts.machine_cores}{nodes}"
    if facts.cores < 2 * facts.ranks_here:
        shared = f", for {facts.ranks_here} ranks" if facts.ranks_here > 1 else ""
        return Finding(
            check="cores",
            level="warn",
            found=found + shared,
            mend="give the job more cores (a container's CPU limit, Slurm's --cpus-per-task): decoding and training "
            "share them",
        )
    return Finding(check="cores", level="ok", found=found)


def _memory(facts: MachineFacts) -> Finding:
    part = facts.memory_bytes // max(1, facts.ranks_here)
    limit = "" if facts.memory_bytes >= facts.machine_memory else f" of the machine's {_size(facts.machine_memory)}"
    found = f"{_size(facts.memory_bytes)}{limit}, {_size(min(facts.memory_free, facts.memory_bytes))} free"
    more = "raise the memory limit of the container or job, or lower memory_limit= of the loader"
    if part < _TINY_MEMORY:
        return Finding(check="memory", level="fail", found=found, mend=more)
    if facts.address_bytes is not None:
        return Finding(
            check="memory",
            level="warn",
            found=f"{found}; a process may address {_size(facts.address_bytes)}",
            mend="lift that by `ulimit -v unlimited`: mapped files and CUDA take addresses, not memory",
        )
    if part < _SMALL_MEMORY:
        return Finding(check="memory", level="warn", found=found, mend=more)
    if facts.memory_free < min(facts.memory_bytes, facts.machine_memory) // 20:
        return Finding(check="memory", level="warn", found=found, mend="see what takes it, by `ps aux --sort=-rss`")
    return Finding(check="memory", level="ok", found=found)


def _open_files(facts: MachineFacts) -> Finding:
    found = f"a process may open {facts.open_files:,}"
    if facts.open_files >= _FEW_FILES:
        return Finding(check="open files", level="ok", found=found)
    most = min(max(facts.open_files_most, 0), 65536)
    mend = (
        f"`ulimit -n {most}` before the run"
        if most >= _FEW_FILES
        else f"raise the hard limit, {facts.open_files_most:,}: limits.conf, or docker run --ulimit nofile=65536"
    )
    level: Level = "fail" if facts.open_files < _TOO_FEW_FILES else "warn"
    return Finding(check="open files", level=level, found=found, mend=mend)


def _shm(facts: MachineFacts) -> Finding:
    shm = facts.shm
    mend = "docker run --shm-size=8g; on Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
    if shm.problem:
        return Finding(check="/dev/shm", level="fail" if facts.gpus.present else "warn", found=shm.problem, mend=mend)
    found = f"{_size(shm.free_bytes)} free of {_size(shm.total_bytes)}"
    if shm.free_bytes < _TINY_SHM:
        return Finding(check="/dev/shm", level="fail" if facts.gpus.present else "warn", found=found, mend=mend)
    if shm.free_bytes < _SMALL_SHM and facts.gpus.present > 1:
        return Finding(check="/dev/shm", level="warn", found=found, mend=mend)
    return Finding(check="/dev/shm", level="ok", found=found)


def _space(check: str, space: SpaceFacts, mend: str) -> Finding:
    found = f"{space.path}: "
    if space.problem:
        return Finding(check=check, level="fail", found=found + space.problem, mend=mend)
    found += f"{_size(space.free_bytes)} free of {_size(space.total_bytes)}"
    if space.free_bytes < _TINY_DISK:
        return Finding(check=check, level="fail", found=found, mend=f"free space there, or {mend}")
    if space.free_files is not None and space.free_files < _FEW_INODES:
        found += f", but only {space.free_files:,} more files"
        return Finding(check=check, level="fail", found=found, mend=f"remove small files there, or {mend}")
    if space.is_memory:
        return Finding(check=check, level="warn", found=f"{found}, in memory", mend=f"{mend}: what lies here is memory")
    if space.free_bytes < _SMALL_DISK:
        return Finding(check=check, level="warn", found=found, mend=f"free space there, or {mend}")
    return Finding(check=check, level="ok", found=found)


def _store(store: StoreFacts) -> Finding:
    if store.problem:
        return Finding(
            check="store",
            level="fail",
            found=store.problem,
            mend="check the URL, the endpoint (--storage-option endpoint=URL), the credentials and the network",
        )
    found = f"{store.url} listed in {store.seconds:.2f} s"
    if store.seconds > _SLOW_STORE_S:
        mend = "read from a store in the same region; `penstock bench` measures it"
        return Finding(check="store", level="warn", found=found, mend=mend)
    return Finding(check="store", level="ok", found=found)


def _clock(store: StoreFacts) -> Finding:
    if store.skew_s is None:
        return Finding(check="clock", level="ok", found="not compared: the store gave no time")
    skew = abs(store.skew_s)
    if skew <= _SKEW_DOUBTFUL_S:
        return Finding(check="clock", level="ok", found=f"within {max(1, round(skew)):.0f} s of the store's")
    side = "behind" if store.skew_s > 0 else "ahead of"
    found = f"{skew:,.0f} s {side} the store's"
    if skew >= _SKEW_REFUSED_S:
        return Finding(
            check="clock",
            level="fail",
            found=found,
            mend="set the clock (chronyd, systemd-timesyncd): S3 refuses signatures that are 15 minutes off",
        )
    return Finding(check="clock", level="warn", found=found, mend="set the clock (chronyd, systemd-timesyncd)")


def _ranks(ranks: RankFacts) -> Iterator[Finding]:
    hosts = f"{ranks.world_size} ranks on {ranks.hosts} host{'s' * (ranks.hosts != 1)}"
    if ranks.problem:
        yield Finding(
            check="network",
            level="fail",
            found=f"{ranks.world_size} ranks by {ranks.backend}: {ranks.problem}",
            mend="let all ports between the nodes through, name the interface in GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME, and see that each node starts as many ranks as torchrun expects",
        )
        return
    found = (
        f"{hosts} by {ranks.backend}: {_duration(ranks.latency_s)} for one number, "
        f"{ranks.bytes_per_s / 1e6:,.0f} MB/s a rank"
    )
    if ranks.latency_s > _SLOW_LATENCY_S or ranks.bytes_per_s < _SLOW_BYTES_PER_S:
        yield Finding(
            check="network",
            level="warn",
            found=found,
            mend="see that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the fast interface, and that cores are free",
        )
    else:
        yield Finding(check="network", level="ok", found=found)
    for name, versions in ranks.versions:
        yield Finding(
            check=name,
            level="fail",
            found=f"ranks have different versions: {', '.join(versions)}",
            mend="start all nodes from one image or environment",
        )
    if ranks.spread_s > _SPREAD_DOUBTFUL_S:
        yield Finding(
            check="clocks",
            level="warn",
            found=f"those of the ranks are {ranks.spread_s:,.0f} s apart",
            mend="set the clocks (chronyd, systemd-timesyncd): the audit orders attempts by them",
        )


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 0.001 else f"{1000 * seconds:.1f} ms"


def _size(count: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (_GIB, "GiB"), (_MIB, "MiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1024:,.0f} KiB"
