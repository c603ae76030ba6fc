"""A mixture of 8 data sets against one data set of the same samples.

Each pass runs in a process of its own, so that nothing is warm but the file system's cache, and the two take turns,
each first in every other round, so that what else the machine does falls on both.

With ``--peers``, a mixture of two sources of raw samples against other loaders' mixtures of the same, in turn. Peers
may have environments of their own: ``--peers litdata=/path/to/python mosaicml-streaming=... webdataset=...``.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.benchmarks.child_arguments import one_of, take_mode
from penstock.benchmarks.machine import describe_machine
from penstock.loader import DistributedDataLoader, Mixture, Source, TokensFormat, pack
from penstock.loader.dataset.manifest import MANIFEST_NAME

from . import mixture_peers
from .arguments import OptionalPath, parse_config

_SOURCES, _SEQ_LEN = 8, 2048
_BATCH = {"tokens": 64, "raw": 64, "rows": 1024}
_CASES = tuple(_BATCH)
_CONTENDERS = ("one", "mixture")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Passes over one data set and over a mixture of its eighths: tokens, raw bytes in tar, and rows of 20 numbers."""

    rounds: int = 5
    """Passes of each in turn."""

    sequences: int = 65_536
    """Sequences of 2,048 tokens."""

    blobs: int = 8_000
    """Samples of 38 kB in tar."""

    rows: int = 4_000_000
    """Rows of 20 float32 in parquet."""

    cases: tuple[str, ...] = _CASES
    """Which of them."""

    peers: tuple[str, ...] = ()
    """Other loaders to compare with, each as NAME=PYTHON, the interpreter that has it."""

    peer_samples: int = 8_000
    """Samples of 38 kB that each delivers in a pass, 7 to 3 of two sources of three quarters of this."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def write_data(folder: Path, config: Config) -> None:
    """Eight folders a case; the whole data set is the folder above them."""
    rng = np.random.default_rng(0)
    for number in range(_SOURCES):
        tokens = rng.integers(0, 50_000, config.sequences // _SOURCES * _SEQ_LEN, dtype=np.uint16)
        (folder / f"tokens/{number}").mkdir(parents=True)
        (folder / f"tokens/{number}/tokens.bin").write_bytes(tokens.tobytes())
        blobs = ({"__key__": f"{number}{i:06d}", "jpg": rng.bytes(38_000)} for i in range(config.blobs // _SOURCES))
        pack(blobs, folder / f"raw/{number}", format="tar", shard_bytes=20 << 20, progress=False)
        # Those beside the parts have checksums, which the whole would lack: neither is to compare any.
        (folder / f"raw/{number}" / MANIFEST_NAME).unlink()
        (folder / f"rows/{number}").mkdir(parents=True)
        values = rng.standard_normal((20, config.rows // _SOURCES), dtype=np.float32)
        table = pa.table({f"c{column}": values[column] for column in range(20)})
        pq.write_table(table, folder / f"rows/{number}/rows.parquet", row_group_size=50_000, compression="zstd")


def read_once(case: str, folder: str, contender: str) -> dict[str, float]:
    """One pass in this process, timed from its beginning with the data sets opened.

    The consumer touches every sample, so that no laziness counts as speed.
    """
    options: dict[str, Any] = {"format": TokensFormat(seq_len=_SEQ_LEN)} if case == "tokens" else {"decode": None}
    parts = {str(number): Source(f"{folder}/{number}") for number in range(_SOURCES)}
    source: Any = Mixture(parts, stop="all_exhausted") if contender == "mixture" else f"{folder}/**"
    touched = samples = 0
    with DistributedDataLoader(source, batch_size=_BATCH[case], seed=3, **options) as loader:
        started, cpu = time.perf_counter(), time.process_time()
        for batch in loader:
            first = next(iter(batch.values())) if case == "rows" else batch["tokens" if case == "tokens" else "jpg"]
            touched += sum(map(len, first)) if case == "raw" else int(first[:, 0].sum()) if case == "tokens" else 1
            samples += len(first)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert touched
    return {"samples_per_s": samples / seconds, "cpu_us_per_sample": cpu / samples * 1e6}


def measure_state() -> dict[str, float]:
    """The JSON of a state of 8 sources on 4,096 lanes, and how long it takes to read and load it."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_SOURCES):
            path = Path(folder, str(number))
            path.mkdir()
            pq.write_table(pa.table({"n": np.arange(100_000)}), path / "rows.parquet", row_group_size=1000)
        mixture = Mixture({str(number): Source(Path(folder, str(number))) for number in range(_SOURCES)})
        with DistributedDataLoader(mixture, batch_size=64, lanes=4096) as loader:
            next(iter(loader))
            text = json.dumps(loader.state_dict())
        with DistributedDataLoader(mixture, batch_size=64, lanes=4096) as loader:
            started = time.perf_counter()
            loader.load_state_dict(json.loads(text))
            return {"bytes": len(text), "load_s": time.perf_counter() - started}


def measure(config: Config, folder: Path) -> dict[str, Any]:
    """The medians of each case and contender, and the ratio of the medians."""
    found: dict[str, Any] = {}
    for case in config.cases:
        runs: dict[str, list[dict[str, float]]] = {"one": [], "mixture": []}
        for round_ in range(-1, config.rounds):  # the first, in which the indexes are made, is not counted
            for contender in ("one", "mixture") if round_ % 2 else ("mixture", "one"):
                command = [sys.executable, "-m", "devtools.mixture", "--pass", case, str(folder / case)]
                done = subprocess.run([*command, contender], check=True, capture_output=True, text=True)
                if round_ >= 0:
                    runs[contender].append(json.loads(done.stdout))
        found[case] = {}
        for unit, digits in (("samples_per_s", 0), ("cpu_us_per_sample", 2)):
            one, mixed = ([run[unit] for run in runs[contender]] for contender in ("one", "mixture"))
            ratios = [with_ / without for with_, without in zip(mixed, one, strict=True)]
            found[case][unit] = {
                "one": round(statistics.median(one), digits),
                "mixture": round(statistics.median(mixed), digits),
                "ratio": round(statistics.median(mixed) / statistics.median(one), 3),
                "ratio_by_round": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        print(case, found[case], flush=True)
    return found


def read_two(folder: str, samples: int) -> dict[str, float]:
    """Our pass over the two sources of raw samples, in this process."""
    parts = {
        str(source): Source(f"{folder}/{source}", weight=share) for source, share in enumerate(mixture_peers.SHARES)
    }
    cpu = time.process_time()
    with DistributedDataLoader(
        Mixture(parts, stop="never"),
        batch_size=mixture_peers.BATCH,
        threads=mixture_peers.WORKERS,
        decode=None,
        columns=["jpg"],
    ) as loader:
        found = mixture_peers.time_batches(loader, samples)
    return {**found, "cpu_us_per_sample": (time.process_time() - cpu) / found["samples"] * 1e6}


def measure_peers(config: Config, folder: Path) -> dict[str, Any]:
    """The medians of each loader, and ours as a multiple of theirs, round by round."""
    pythons = dict(peer.split("=", 1) for peer in config.peers)
    of_source = config.peer_samples * 3 // 4
    for name, python in pythons.items():
        _run([python, mixture_peers.__file__, name, "write", str(folder / name), str(of_source)])
    if "webdataset" not in pythons:
        for source in (0, 1):
            pack(
                mixture_peers.make_samples(source, of_source),
                folder / f"webdataset/{source}",
                format="tar",
                progress=False,
            )
    runs: dict[str, list[dict[str, float]]] = {"penstock": [], **{name: [] for name in pythons}}
    samples = str(config.peer_samples)
    for round_ in range(-1, config.rounds):  # the first, in which index and page cache are filled, is not counted
        for name in sorted(runs, reverse=round_ % 2 == 0):
            if name == "penstock":
                command = [sys.executable, "-m", "devtools.mixture", "--pass-two"]
                found = _run([*command, str(folder / "webdataset"), samples])
            else:
                found = _run([pythons[name], mixture_peers.__file__, name, "read", str(folder / name), samples])
            if round_ >= 0:
                runs[name].append(found)
    results: dict[str, Any] = {}
    for name, found_runs in runs.items():
        results[name] = {key: round(statistics.median(run[key] for run in found_runs), 3) for key in found_runs[0]}
        ratios = [
            ours["samples_per_s"] / theirs["samples_per_s"]
            for ours, theirs in zip(runs["penstock"], found_runs, strict=True)
        ]
        results[name]["penstock_faster_by"] = [
            round(each, 2) for each in (min(ratios), statistics.median(ratios), max(ratios))
        ]
        print(name, results[name], flush=True)
    return results


def _run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    one_pass = take_mode("--pass", (one_of(_CASES), str, one_of(_CONTENDERS)), "python -m devtools mixture")
    if one_pass is not None:
        print(json.dumps(read_once(*one_pass)))
        return
    of_two = take_mode("--pass-two", (str, int), "python -m devtools mixture")
    if of_two is not None:
        print(json.dumps(read_two(*of_two)))
        return
    config = parse_config(Config, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), config)
        given = {name: value for name, value in asdict(config).items() if name != "out"}
        command = shlex.join(["python", "-m", "devtools.mixture", *sys.argv[1:]])
        results = {"command": command, "machine": describe_machine(), "config": given}
        results["cases"] = measure(config, Path(folder))
        if config.peers:
            results["peers"] = measure_peers(config, Path(folder, "peers"))
    results["state"] = measure_state()
    print("state", results["state"])
    if config.out is not None:
        config.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
