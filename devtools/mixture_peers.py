"""Other loaders' mixtures of two sources of raw samples, as their manuals show them, for any Python that has them.

python mixture_peers.py litdata write FOLDER SAMPLES
python mixture_peers.py litdata read FOLDER SAMPLES

Imports nothing of penstock, so that a peer may have an environment of its own: ``benchmarks.mixture --peers`` runs it
so. Sources are FOLDER/0 and FOLDER/1, mixed 7 to 3, in batches of 64, by 4 worker processes. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SHARES, BATCH, WORKERS, SAMPLE_BYTES = (0.7, 0.3), 64, 4, 38_000


def make_samples(source: int, count: int) -> Iterator[dict[str, Any]]:
    """The samples of one source: keys and random bytes, of which the first tells the source."""
    rng = np.random.default_rng(source)
    for number in range(count):
        yield {"__key__": f"{source}{number:06d}", "jpg": bytes([source]) + rng.bytes(SAMPLE_BYTES - 1)}


def time_batches(batches: Iterable[Any], samples: int) -> dict[str, float]:
    """Speeds from the first batch on, which waits for processes and plans, until ``samples`` were delivered.

    ``batches`` are lists of bytes, or dicts of ``jpg`` to such. Ends with the CPU time of this process; that of workers
    is known once they have ended, see ``main``.
    """
    seen = of_first = 0
    started = time.perf_counter()
    first = 0
    for batch in batches:
        values = batch["jpg"] if isinstance(batch, dict) else batch
        of_first += sum(value[0] == 0 for value in values)
        seen += len(values)
        if not first:
            started, first = time.perf_counter(), seen
        if seen >= samples:
            break
    return {
        "samples_per_s": (seen - first) / (time.perf_counter() - started),
        "share_of_first": of_first / seen,
        "samples": seen,
    }


def count_cpu() -> float:
    """Seconds of CPU time of this process and of its children that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


def _bare(samples: list[Any]) -> list[bytes]:
    return [sample["jpg"] for sample in samples]


def _write_litdata(folder: Path, source: int, count: int) -> None:
    cache = importlib.import_module("litdata.streaming.cache").Cache(str(folder), chunk_bytes=20 << 20)
    for number, sample in enumerate(make_samples(source, count)):
        cache._add_item(number, sample)
    cache.done()
    cache.merge()


def _read_litdata(folder: Path, samples: int) -> Iterable[Any]:
    lit = importlib.import_module("litdata")
    sources = [lit.StreamingDataset(str(folder / str(source)), shuffle=True) for source in (0, 1)]
    mixed = lit.CombinedStreamingDataset(sources, weights=list(SHARES), iterate_over_all=False)
    return lit.StreamingDataLoader(mixed, batch_size=BATCH, num_workers=WORKERS, collate_fn=_bare)  # type: ignore[no-any-return]


def _import_streaming() -> Any:
    # Its ready-made vision data sets import torchvision, which is unused here, and fails where torch is another.
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    return importlib.import_module("streaming")


def _write_mosaicml(folder: Path, source: int, count: int) -> None:
    columns = {"__key__": "str", "jpg": "bytes"}
    with _import_streaming().MDSWriter(out=str(folder), columns=columns, size_limit=20 << 20) as writer:
        for sample in make_samples(source, count):
            writer.write(sample)


def _read_mosaicml(folder: Path, samples: int) -> Iterable[Any]:
    streaming, data = _import_streaming(), importlib.import_module("torch.utils.data")
    streaming.base.util.clean_stale_shared_memory()
    streams = [
        streaming.Stream(local=str(folder / str(source)), proportion=share) for source, share in enumerate(SHARES)
    ]
    mixed = streaming.StreamingDataset(
        streams=streams, epoch_size=samples, batch_size=BATCH, shuffle=True, num_canonical_nodes=1
    )
    return data.DataLoader(mixed, batch_size=BATCH, num_workers=WORKERS, collate_fn=_bare)  # type: ignore[no-any-return]


def _write_webdataset(folder: Path, source: int, count: int) -> None:
    wds = importlib.import_module("webdataset")
    with wds.ShardWriter(str(folder / "%06d.tar"), maxsize=20 << 20, verbose=0) as writer:
        for sample in make_samples(source, count):
            writer.write(sample)


def _read_webdataset(folder: Path, samples: int) -> Iterable[Any]:
    wds = importlib.import_module("webdataset")
    parts = []
    for source in (0, 1):
        shards = sorted(map(str, folder.glob(f"{source}/*.tar")))
        parts.append(wds.WebDataset(shards, resampled=True, shardshuffle=False).shuffle(1000))
    mixed = wds.DataPipeline(wds.RandomMix(parts, list(SHARES)), wds.batched(BATCH, collation_fn=_bare))
    return wds.WebLoader(mixed, batch_size=None, num_workers=WORKERS)  # type: ignore[no-any-return]


PEERS: dict[str, tuple[Callable[[Path, int, int], None], Callable[[Path, int], Iterable[Any]]]] = {
    "mosaicml-streaming": (_write_mosaicml, _read_mosaicml),
    "webdataset": (_write_webdataset, _read_webdataset),
    "litdata": (_write_litdata, _read_litdata),
}


def main(peer: str, verb: str, folder: Path, samples: int) -> None:
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # it would ask the package index at every start
    write, read = PEERS[peer]
    if verb == "write":
        for source in (0, 1):
            place = folder / str(source)
            place.mkdir(parents=True)
            write(place, source, samples)
        print("{}")
        return
    cpu = count_cpu()
    loader = read(folder, samples)
    batches = iter(loader)
    found = time_batches(batches, samples)
    del batches, loader  # ends the workers, whose CPU time is known then
    found["cpu_us_per_sample"] = (count_cpu() - cpu) / found["samples"] * 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "mixture_peers.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("verb", choices=("write", "read"))
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("samples", metavar="SAMPLES", type=int, help="of each source where it writes, of both else")
    main(**vars(parser.parse_args()))
