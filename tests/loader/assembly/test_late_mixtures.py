"""Rows of a mixture are copied when their batch is due, as those of a data set are."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader, Mixture, Source, TokensFormat
from penstock.loader.assembly.kind_rows import KindRows, RowKinds
from penstock.loader.decoding.rows import Rows


def shift(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"] + 1}


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, shift])
def test_rows_of_a_mixture_are_copied_late_and_are_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        tokens = np.arange(200 * 512, dtype=np.uint32) + 1_000_000 * number
        tokens.tofile(tmp_path / str(number) / "a.bin")
    sources = {"a": Source(tmp_path / "0", transform=transform), "b": Source(tmp_path / "1")}
    gather, late = RowKinds.gather, set[bool]()

    def note(kinds: RowKinds, *args: Any, may_wait: bool, **options: Any) -> Any:
        rows = gather(kinds, *(args if may_wait else (*args[:3], None)), **options)
        assert isinstance(rows, Rows if transform is None else KindRows)
        late.add(any(of_kind.late for of_kind in ([rows] if isinstance(rows, Rows) else rows.rows)))
        return rows

    found = []
    for may_wait in (True, False):
        monkeypatch.setattr(RowKinds, "gather", lambda *args, may_wait=may_wait: note(*args, may_wait=may_wait))
        mixture, options = Mixture(sources), {"format": TokensFormat(seq_len=512, dtype="uint32")}
        with DistributedDataLoader(mixture, batch_size=16, rank=0, world_size=1, with_ids=True, **options) as loader:
            batches = [{name: values.tolist() for name, values in batch.items()} for batch in islice(loader, 40)]
        found.append(batches)
        assert late == {may_wait}
        late.clear()
    assert found[0] == found[1]
    for batch in found[0]:
        for source, sample, row in zip(batch["__source__"], batch["__id__"], batch["tokens"], strict=True):
            first = 1_000_000 * source + 512 * sample + (source == 0 and transform is not None)
            assert row == list(range(first, first + 512))
