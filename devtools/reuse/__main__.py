"""Search for wrong bytes in memory that is used again.

Random programmes of users keep, change and drop what loaders deliver, of data whose every value follows from its
sample's id, and compare each value when it comes and long after.

A seed draws a programme: a data set, a loader's arguments, ways to keep a batch or a part of it (views, slices, arrays,
tensors, DLPack, Arrow, graphs, cycles, pickles), values that are overwritten, forks, interrupts, resumes, passes that
are begun again. With --s3 it reads from a real S3 server, through a proxy that delays, cuts off and damages answers.

python -m devtools reuse --minutes 10 --seed 3 --only tokens parquet
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

from penstock.storage.errors import PenstockError

from ..arguments import make_parser
from .data import NAMES
from .held import Tally
from .place import Place, open_place
from .programme import Programme
from .settings import draw_settings

_PROGRAMME_S = 20.0
_SEEDS = 1_000_000  # of programmes for one --seed


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long programmes are begun (1)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other programmes (0)")
    parser.add_argument(
        "--only", nargs="+", default=list(NAMES), choices=NAMES, metavar="DATASET", help=", ".join(NAMES)
    )
    parser.add_argument("--s3", action="store_true", help="read from an S3 server; one is started if none is named")
    parser.add_argument("--programme", type=int, help="run this one alone, which a fault named")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of small budgets, bad samples and read-only tensors, which are meant
    tally, faults = Tally(), 0
    until = time.monotonic() + 60 * options.minutes
    numbers = itertools.count(options.seed * _SEEDS) if options.programme is None else [options.programme]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="penstock-reuse-")))
        place = opened.enter_context(open_place(folder, options.only, is_s3=options.s3))
        for number in numbers:
            if time.monotonic() > until:
                break
            faults += run_one(number, place, folder, tally, until)
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in tally.events.items() if count)
    print(f"{tally.programmes:,} programmes, {tally.batches:,} batches; {counts}")
    print(f"{tally.values:,} values compared, kept ones {tally.looks:,} times again, in {len(tally.ways)} ways")
    print(f"{tally.nbytes / 1e9:.1f} GB; {faults or 'no'} fault{'' if faults == 1 else 's'}")
    return 1 if faults else 0


def run_one(number: int, place: Place, folder: Path, tally: Tally, until: float) -> bool:
    """Run a programme, and print what is wrong; whether something is."""
    draw = random.Random(number)
    settings = draw_settings(place, draw, folder)
    try:
        Programme(settings, draw, tally).run(min(until, time.monotonic() + _PROGRAMME_S))
    except PenstockError as exc:
        print(f"programme {number}: {type(exc).__name__}: {exc}\n  {settings}", flush=True)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
