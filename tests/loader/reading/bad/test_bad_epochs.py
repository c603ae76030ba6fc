"""Which samples are bad is known until their batches are handed out, however far ahead is read."""

from __future__ import annotations

import numpy as np
import pytest
from made_manifest import make_manifest

from penstock.loader.reading.bad import samples
from penstock.loader.reading.bad.samples import BadSamples, Limit

IDS = np.arange(10)


def test_epochs_that_are_read_far_ahead_keep_their_bad_samples() -> None:
    bad = BadSamples(make_manifest([[50, 50]]), Limit(100, "100"))
    for epoch in range(50):
        bad.note_avoided(epoch, [3, 7])
    assert all(bad.among(epoch, IDS).tolist() == [3, 7] for epoch in range(50))


def test_memory_for_them_has_an_end_beside_the_last_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_IDS", 20)
    bad = BadSamples(make_manifest([[50, 50]]), Limit(100, "100"))
    for epoch in range(10):
        bad.note_avoided(epoch, range(10))
    assert [len(bad.among(epoch, IDS)) for epoch in range(10)] == [0] * 7 + [10] * 3
