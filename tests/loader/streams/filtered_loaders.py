"""Loaders that drop odd samples."""

from __future__ import annotations

from typing import Any

from row_functions import drop_odd

from penstock import DistributedDataLoader

SIZES = [37, 5, 80, 1, 64, 23, 90, 12]
TOTAL = sum(SIZES)


def make(source: Any, **options: Any) -> DistributedDataLoader[Any]:
    kept = {} if "keep" in options or "may_drop" in options else {"transform": drop_odd, "may_drop": True}
    return DistributedDataLoader(
        source, **{"batch_size": 8, "last_batch": "partial", "with_ids": True, **kept, **options}
    )
