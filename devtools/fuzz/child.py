"""One process in which atheris, led by the lines of our parsers, makes inputs until its time is up or one kills it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.benchmarks.child_arguments import take_arguments

MOST_BYTES = 1 << 16
# The fuzzer itself takes memory for each input that reached new lines: the limit is set anew after so many cases.
_LIMITED_ANEW = 1024
# A case on a busy machine; whether it hangs is judged again by its CPU time.
_CASE_S = 60


def make_entry(engine: str, name: str, take: Callable[[bytes], None]) -> Callable[[bytes], object]:
    """Make what the fuzzer calls with its bytes: ``take`` gets them, or what hypothesis makes of them by a grammar."""
    if engine == "cover":
        return take
    from hypothesis import HealthCheck, given, settings

    from .structured import strategies

    def run(data: bytes) -> None:
        take(data)

    unbounded = settings(database=None, deadline=None, suppress_health_check=[*HealthCheck])
    property_: Any = unbounded(given(strategies()[name])(run))  # type: ignore[no-untyped-call]
    entry: Callable[[bytes], object] = property_.hypothesis.fuzz_one_input
    return entry


def main(engine: str, name: str, seed: str, seconds: str, folder: str) -> None:
    import atheris  # type: ignore[import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["penstock.loader", "penstock.storage"]):
        from .limits import judge, limit_memory, limit_process, name_of_case
        from .targets import TARGETS
    target, cases = TARGETS[name], 0
    shortest: dict[str, int] = {}

    def run(data: bytes) -> None:
        nonlocal cases
        cases += 1
        if cases % _LIMITED_ANEW == 0:
            limit_memory()
        fault = judge(target.run, data)
        if fault is not None and len(data) < shortest.get(fault, sys.maxsize):
            shortest[fault] = len(data)
            Path(folder, f"found-{name_of_case(data)}").write_bytes(data)

    def mutate(data: bytes, max_bytes: int, draw: int) -> bytes:
        """Change an input; half of them have their checksums mended, which would reveal any damage at once."""
        changed = bytearray(atheris.Mutate(data, max_bytes))
        if draw % 2 and target.repair is not None:
            target.repair(changed)
        return bytes(changed[:max_bytes])

    for data in target.seeds():  # imports and caches of the first case are no allocations of any
        judge(target.run, data)
    limit_process()
    options = [
        f"-max_total_time={max(1, round(float(seconds)))}", f"-seed={int(seed) + 1}", f"-max_len={MOST_BYTES}",
        f"-dict={Path(folder, 'words')}", f"-artifact_prefix={folder}/", f"-timeout={_CASE_S}", "-rss_limit_mb=0",
        "-malloc_limit_mb=0", "-len_control=0", "-verbosity=0", "-print_final_stats=1", "-reload=0",
    ]  # fmt: skip
    is_mended = engine == "cover" and target.repair is not None
    given = ["fuzz", *options, str(Path(folder, "corpus"))]
    atheris.Setup(given, make_entry(engine, name, run), **({"custom_mutator": mutate} if is_mended else {}))
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main(*take_arguments("ENGINE TARGET SEED SECONDS FOLDER", "python -m devtools fuzz"))
