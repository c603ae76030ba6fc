"""One process that runs cases until its time is up, or a case kills it. The running case lies in a file."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock.benchmarks.child_arguments import take_arguments

from .limits import judge, limit_memory, limit_process, name_of_case, time_limit
from .mutation import MOST_BYTES, Mutator
from .structured import strategies
from .targets import TARGETS

# Contents of the file: cases so far, the length of the running one (0: none runs), and its bytes.
_HEAD = struct.Struct("<QQ")
# The fuzzer itself takes memory for each input that reached new lines: the limit is set anew after so many cases.
_LIMITED_ANEW = 1024
# Inputs that are kept of one fault: the shortest.
_KEPT = 3


class Stage:
    """The file in which a child leaves each case before it runs. One process writes, another reads after its end."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_HEAD.size + 2 * MOST_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def begin(self, number: int, data: bytes) -> None:
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, 0, number, len(data))

    def end(self, number: int) -> None:
        _HEAD.pack_into(self._map, 0, number, 0)

    def read(self) -> tuple[int, bytes]:
        """Read the number of cases so far, and the one that was running; empty where none was."""
        number, length = _HEAD.unpack_from(self._map)
        return number, self._map[_HEAD.size : _HEAD.size + length]


class Case:
    """Runs one case after another, and keeps those with a fault: a file of JSON each."""

    def __init__(self, name: str, folder: Path) -> None:
        self._run = TARGETS[name].run
        self._folder = folder
        self._stage = Stage(folder / "stage")
        self._number = self._stage.read()[0]
        self._lengths: dict[str, list[int]] = {}

    def __call__(self, data: bytes) -> None:
        data = bytes(data[: 2 * MOST_BYTES])
        self._number += 1
        if self._number % _LIMITED_ANEW == 0:
            limit_memory()
        self._stage.begin(self._number, data)
        with time_limit():
            fault = judge(self._run, data)
        self._stage.end(self._number)
        if fault is not None:
            self._keep(fault, data)

    def _keep(self, fault: str, data: bytes) -> None:
        lengths = self._lengths.setdefault(fault, [])
        if len(lengths) < _KEPT or len(data) < max(lengths):
            lengths.append(len(data))
            keep_finding(self._folder, fault, data)


def keep_finding(folder: Path, fault: str, data: bytes) -> None:
    """Write an input and its fault."""
    path = folder / f"found-{name_of_case(data)}.json"
    path.write_text(json.dumps({"fault": fault, "input": data.hex()}))


def mutate(name: str, case: Case, seed: int, seconds: float) -> None:
    """Run damaged seeds."""
    target = TARGETS[name]
    mutator = Mutator(target.seeds(), seed, target.words, target.repair)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        case(mutator.next())


def structured(name: str, case: Case, seed: int, seconds: float) -> None:
    """Run inputs that hypothesis makes up by their grammar."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    until, round_ = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        round_ += 1

        @seeded(seed * 1000 + round_)
        @settings(
            max_examples=500,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=[*HealthCheck],
        )
        @given(strategies()[name])
        def run(data: bytes) -> None:
            if time.monotonic() < until:
                case(data)

        run()


def cover(name: str, case: Case, seed: int, seconds: float) -> NoReturn:
    """Run inputs that atheris makes of the seeds, led by which lines of Python it reaches; ends the process."""
    import atheris  # type: ignore[import-untyped, unused-ignore]

    corpus = Path(os.environ[CORPUS])
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    words = Path(corpus.parent / "words")  # libFuzzer takes no empty one
    words.write_text("".join(f'"{_escape(word)}"\n' for word in (*TARGETS[name].words, b"0") if len(word) < 64))
    options = [
        f"-max_total_time={max(1, round(seconds))}", f"-seed={seed + 1}", f"-max_len={MOST_BYTES}", f"-dict={words}",
        "-timeout=0", "-rss_limit_mb=0", "-malloc_limit_mb=0", "-handle_segv=0", "-handle_bus=0", "-handle_abrt=0",
        "-handle_ill=0", "-handle_fpe=0", "-verbosity=0", "-print_final_stats=0", "-reload=0",
    ]  # fmt: skip
    atheris.Setup(["fuzz", *options, str(corpus)], case)
    atheris.Fuzz()
    raise AssertionError("atheris ends the process")


def _escape(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


CORPUS = "PENSTOCK_FUZZ_CORPUS"
ENGINES: dict[str, Callable[[str, Case, int, float], None]] = {
    "mutate": mutate, "structured": structured, "cover": cover,
}  # fmt: skip


def main(engine: str, name: str, seed: str, seconds: str, folder: str) -> None:
    case = Case(name, Path(folder))
    with (Path(folder) / "log").open("w") as log:
        # Imports and caches of the first case are no allocations of any.
        for data in TARGETS[name].seeds():
            judge(TARGETS[name].run, data)
        limit_process(log)
        ENGINES[engine](name, case, int(seed), float(seconds))


if __name__ == "__main__":
    main(*take_arguments("ENGINE TARGET SEED SECONDS FOLDER", "python -m devtools fuzz"))
