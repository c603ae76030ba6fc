"""Measure how fast ready tokens are packed, and how full sequences get, by the number of documents packed together.

python -m devtools packing --out benchmarks/results/packing.json
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader import DistributedDataLoader, Packing, TokenDocumentsFormat, TokensFormat
from penstock.loader.packing.config import FIELDS
from penstock.loader.packing.packed import Documents, pack_documents

from .arguments import OptionalPath, parse_config


@dataclass(frozen=True, kw_only=True)
class Config:
    """Packs log-normal documents of uint16 tokens in one thread; quartiles of tokens per second of its CPU time."""

    seq_lens: tuple[int, ...] = (2048, 8192)
    """Tokens of a sequence."""

    buffers: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    """Documents that are packed together."""

    median: int = 500
    """The median of a document's length in tokens."""

    sigma: float = 1.0
    """The standard deviation of its logarithm; with 1.0 the mean is 1.65 medians."""

    documents: int = 65_536
    """Documents in all, the same for each size of a buffer."""

    rounds: int = 5
    """Times that all of them are packed."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def make_documents(config: Config) -> Documents:
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(config.median), config.sigma, config.documents)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Documents(rng.integers(0, 50_000, int(offsets[-1])).astype(np.uint16), offsets)


def cut(documents: Documents, size: int) -> list[Documents]:
    """Buffers of ``size`` documents."""
    bounds = [*range(0, len(documents), size), len(documents)]
    offsets = documents.offsets
    return [
        Documents(documents.tokens[offsets[low] : offsets[high]], offsets[low : high + 1] - offsets[low])
        for low, high in pairwise(bounds)
    ]


def measure(buffers: list[Documents], packing: Packing, rounds: int) -> dict[str, Any]:
    tokens = sum(len(one.tokens) for one in buffers)
    speeds = []
    for _ in range(rounds):
        started = time.thread_time()
        counts = []
        for one in buffers:
            packed = pack_documents(one, packing)
            assert len(packed.fields) == len(FIELDS)  # all arrays are made
            counts.append(packed.count())
        speeds.append(tokens / (time.thread_time() - started))
    return {
        "tokens_per_s": np.percentile(speeds, (25, 50, 75)).tolist(),
        "efficiency": sum(one.tokens for one in counts) / sum(packing.seq_len * one.sequences for one in counts),
        "cut_documents": sum(one.cut_documents for one in counts) / len(buffers) / len(buffers[0]),
    }


def read(folder: str, **options: Any) -> tuple[float, float]:
    """Tokens per second, and per second of CPU time, of one pass of a loader on 4 threads over token files."""
    tokens = 0
    started, cpu = time.perf_counter(), time.process_time()
    with DistributedDataLoader(folder, batch_size=16, threads=4, **options) as loader:
        for batch in loader:
            tokens += batch["tokens"].numel()
            batch["tokens"][:, -1].sum()
    return tokens / (time.perf_counter() - started), tokens / (time.process_time() - cpu)


def measure_loader(documents: Documents, rounds: int) -> dict[str, Any]:
    """Tokens per second through a loader, packed and as they lie, in turn.

    Sequences that are not packed are one array, of int64. Packed ones are compared twice: with this array alone, and
    with all four, which are 21 bytes a token instead of 8.
    """
    tokens = np.maximum(documents.tokens, 1)
    tokens[documents.offsets[1:] - 1] = 0
    with tempfile.TemporaryDirectory() as folder:
        tokens.tofile(f"{folder}/tokens.bin")
        documents_of = {"format": TokenDocumentsFormat(eos=0)}
        contenders: dict[str, dict[str, Any]] = {
            "unpacked": {"format": TokensFormat(seq_len=2048)},
            "packed, tokens alone": {**documents_of, "packing": Packing(seq_len=2048, fields=["tokens"])},
            "packed, all fields": {**documents_of, "packing": Packing(seq_len=2048)},
        }
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(-1, rounds):  # the first round, which writes the index, is not counted
            for name, options in contenders.items():
                found = read(folder, **options)
                if number >= 0:
                    speeds[name].append(found)
    result: dict[str, Any] = {}
    for place, unit in enumerate(("tokens_per_s", "tokens_per_cpu_s")):
        quartiles = {
            name: np.percentile([each[place] for each in found], (25, 50, 75)).tolist()
            for name, found in speeds.items()
        }
        ratios = {name: found[1] / quartiles["unpacked"][1] for name, found in quartiles.items()}
        result[unit] = {"quartiles": quartiles, "of_unpacked": ratios}
        print(f"through a loader, million {unit} (25%, 50%, 75%), and of those of unpacked")
        for name, speed in quartiles.items():
            print(f"  {name:<20} {' '.join(f'{each / 1e6:6.1f}' for each in speed)}  {ratios[name]:.2f}")
    return result


def main(config: Config) -> None:
    documents = make_documents(config)
    measured = []
    print("method    seq_len  documents  efficiency  documents cut  million tokens/s (25%, 50%, 75%)")
    for seq_len in config.seq_lens:
        for method in ("best_fit", "concat"):
            for size in config.buffers:
                packing = Packing(seq_len=seq_len, method=method)
                found = measure(cut(documents, size), packing, config.rounds)
                measured.append({"method": method, "seq_len": seq_len, "documents": size, **found})
                speeds = " ".join(f"{speed / 1e6:6.1f}" for speed in found["tokens_per_s"])
                shares = f"{found['efficiency']:>10.2%}  {found['cut_documents']:>13.2%}"
                print(f"{method:<8} {seq_len:>8}  {size:>9}  {shares}  {speeds}", flush=True)
    through_loader = measure_loader(documents, config.rounds)
    if config.out is not None:
        command = shlex.join(["python", "-m", "devtools.packing", *sys.argv[1:]])
        settings = {name: value for name, value in asdict(config).items() if name != "out"}
        result = {
            "command": command,
            "machine": describe_machine(),
            "versions": list_versions(),
            "settings": settings,
            "measured": measured,
            "through_loader": through_loader,
        }
        config.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config))
