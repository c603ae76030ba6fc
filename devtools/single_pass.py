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


def read_once(case: str, url: str, options: dict[str, Any]) -> dict[str, float]:
    """One pass in this process; the consumer touches every sample, so that no laziness counts as speed."""
    options |= {"format": TokensFormat(seq_len=SEQ_LEN)} if case == "tokens" else {"decode": None}
    if case == "raw view":
        options["raw"] = "view"
    touched = samples = 0
    faults, cpu, started = _faults(), time.process_time(), time.perf_counter()
    first_s = 0.0
    with DistributedDataLoader(url, batch_size=_ROWS_BATCH if case == "rows" else _BATCH, seed=3, **options) as loader:
        for batch in loader:
            first_s = first_s or time.perf_counter() - started
            if case == "tokens":
                touched += int(batch["tokens"][:, -1].sum())
                samples += len(batch["tokens"])
            elif case == "rows":
                touched += int(batch["label"].sum())
                samples += len(batch["label"])
            else:
                touched += sum(value[-1] for value in batch["jpg"])
                samples += len(batch["jpg"])
        seconds = time.perf_counter() - started
    return {
        "samples_per_s": samples / seconds,
        "cpu_us_per_sample": 1e6 * (time.process_time() - cpu) / samples,
        "page_faults": _faults() - faults,
        "first_batch_s": first_s,
        "touched": touched,
    }


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "single_pass.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", metavar="CASE", help='"raw", "raw view", "rows" or "tokens"')
    parser.add_argument("url", metavar="URL")
    parser.add_argument("options", metavar="OPTIONS", type=json.loads, help="arguments of the loader, as JSON")
    print(json.dumps(read_once(**vars(parser.parse_args()))))
