"""The user's arguments for parallelism."""

from __future__ import annotations

from typing import Any, Literal

from ...storage.suggestions import did_you_mean, unknown_choice
from ..errors import ConfigError
from ..limits import can_start_python, parse_bytes, usable_cores, usable_memory
from ..pipeline.tuning import TuningChoice
from ..ranks.detect import local_world_size
from .checks import check_at_least

# Processes that take a rank's images over from its threads.
_LEAST_CORES = 6
_CORES_A_SPARE = 8
_LEAST, _MOST = 8, 32  # fewer would decode less than the threads do
_BYTES = 40 << 20  # of a process, beside what they share
_MEMORY_SHARE = 0.05


def read_tuning(
    threads: int | Literal["auto"],
    fetch_threads: int | Literal["auto"],
    read_ahead: int | str,
    autotune: object,
    memory_limit: int | str,
    processes: int | Literal["auto"],
) -> TuningChoice:
    """Read the choices of threads and read-ahead. Raises ConfigError where one is impossible."""
    counts: dict[str, Any] = {"threads": threads, "fetch_threads": fetch_threads}
    for name, value in counts.items():
        if value != "auto":
            if isinstance(value, str):
                raise ConfigError(f"{name}={value!r}: must be 'auto' or a whole number{did_you_mean(value, ['auto'])}")
            counts[name] = check_at_least(name, value, 1)
    if autotune != "auto" and not isinstance(autotune, bool):
        raise ConfigError(unknown_choice("autotune", autotune, ("auto", True, False)))
    memory_bytes = None if memory_limit == "auto" else parse_bytes(memory_limit, "memory_limit")
    ahead = None if read_ahead == "auto" else parse_bytes(read_ahead, "read_ahead")
    if ahead is not None and memory_bytes is not None and ahead > memory_bytes:
        raise ConfigError(
            f"read_ahead={read_ahead!r} is more than memory_limit={memory_bytes:,}; raise that, or lower this"
        )
    cores = usable_cores()
    return TuningChoice(
        fetch_threads=None if fetch_threads == "auto" else counts["fetch_threads"],
        decode_threads=None if threads == "auto" else counts["threads"],
        read_ahead_bytes=ahead,
        autotune=autotune,
        memory_bytes=memory_bytes,
        cores=max(1, cores // local_world_size()),
        cores_of_node=cores,
        processes=processes,
    )


def count_image_processes(cores: int) -> int:
    """Count the processes that are to decode a rank's images, of so many cores; 0 where its threads are to."""
    if cores < _LEAST_CORES or not can_start_python():
        return 0
    # Some are left to the loop, and to threads that fetch and copy.
    wanted = min(cores - 1 - cores // _CORES_A_SPARE, _MOST)
    in_memory = int(_MEMORY_SHARE * usable_memory() / local_world_size() / _BYTES)
    return min(wanted, in_memory) if in_memory >= min(wanted, _LEAST) else 0
