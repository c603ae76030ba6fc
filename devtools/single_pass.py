"""One first pass in this process, as JSON: ``python -P single_pass.py CASE URL OPTIONS``, for first_pass and profiles.

A script, not a module of the package: it reads with whatever penstock is on the path, older ones too.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from penstock import DistributedDataLoader, TokensFormat

SEQ_LEN = 2048
_BATCH, _ROWS_BATCH = 64, 4096


def read_once(case: str, url: str, options: dict[str, Any], later: int = 0) -> dict[str, float]:
    """One pass in this process, and ``later`` ones; the consumer touches every sample: no laziness counts as speed."""
    options |= {"format": TokensFormat(seq_len=SEQ_LEN)} if case == "tokens" else {"decode": None}
    if case == "raw view":
        options["raw"] = "view"
    faults, cpu, started = _faults(), time.process_time(), time.perf_counter()
    with DistributedDataLoader(url, batch_size=_ROWS_BATCH if case == "rows" else _BATCH, seed=3, **options) as loader:
        first_s, samples, touched = _read(loader, case)
        result = {
            "samples_per_s": samples / (time.perf_counter() - started),
            "cpu_us_per_sample": 1e6 * (time.process_time() - cpu) / samples,
            "page_faults": _faults() - faults,
            "first_batch_s": first_s - started,
            "touched": touched,
        }
        if later:
            cpu, started = time.process_time(), time.perf_counter()
            for _ in range(later):
                _read(loader, case)
            result["later_samples_per_s"] = later * samples / (time.perf_counter() - started)
            result["later_cpu_us_per_sample"] = 1e6 * (time.process_time() - cpu) / (later * samples)
    return result


def _read(loader: Any, case: str) -> tuple[float, int, int]:
    """Read a pass: when its first batch came, by perf_counter(), how many samples it had, and a sum over them."""
    touched = samples = 0
    first_s = 0.0
    for batch in loader:
        first_s = first_s or time.perf_counter()
        if case == "tokens":
            touched += int(batch["tokens"][:, -1].sum())
            samples += len(batch["tokens"])
        elif case == "rows":
            touched += int(batch["label"].sum())
            samples += len(batch["label"])
        else:
            touched += sum(value[-1] for value in batch["jpg"])
            samples += len(batch["jpg"])
    return first_s, samples, touched


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "single_pass.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", metavar="CASE", help='"raw", "raw view", "rows" or "tokens"')
    parser.add_argument("url", metavar="URL")
    parser.add_argument("options", metavar="OPTIONS", type=json.loads, help="arguments of the loader, as JSON")
    parser.add_argument("--later", metavar="N", type=int, default=0, help="passes after the first one (default: 0)")
    print(json.dumps(read_once(**vars(parser.parse_args()))))
