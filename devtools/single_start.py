"""One start in this process, as JSON: ``python -P single_start.py FOLDER SEQ_LEN``, for start.

A script, not a module of the package: it starts whatever penstock is on the path, older ones too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise

import torch  # noqa: F401 - every process of a run has it


def start_once(folder: str, seq_len: int) -> dict[str, float]:
    """Seconds from the import of the loader to its first batch, and the modules of penstock that are there then."""
    times = [time.perf_counter()]
    import pyarrow.parquet  # noqa: F401

    times.append(time.perf_counter())
    from penstock import DistributedDataLoader, TokensFormat

    times.append(time.perf_counter())
    with DistributedDataLoader(folder, batch_size=8, format=TokensFormat(seq_len=seq_len)) as loader:
        times.append(time.perf_counter())
        next(iter(loader))
        times.append(time.perf_counter())
        modules = sum(name.partition(".")[0] == "penstock" for name in sys.modules)
    pyarrow_s, import_s, construction_s, first_batch_s = (stop - start for start, stop in pairwise(times))
    return {
        "pyarrow_s": pyarrow_s,
        "import_s": import_s,
        "modules": modules,
        "construction_s": construction_s,
        "first_batch_s": first_batch_s,
        "total_s": import_s + construction_s + first_batch_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "single_start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="of token files")
    parser.add_argument("seq_len", metavar="SEQ_LEN", type=int, help="tokens of a row")
    print(json.dumps(start_once(**vars(parser.parse_args()))))
