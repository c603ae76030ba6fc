"""The bench of resumes: what it measures is a resume, and its figures are those of its starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from devtools import resume
from penstock.loader import DistributedDataLoader, TokensFormat


def test_its_state_is_the_middle_of_an_epoch_from_which_a_start_reads_a_batch(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    np.arange(512 * 2048, dtype=np.uint16).tofile(tmp_path / "tokens" / "tokens.bin")
    state = json.loads(json.dumps(resume.mid_epoch("tokens", tmp_path)))
    with DistributedDataLoader(tmp_path / "tokens", batch_size=64, seed=3, format=TokensFormat(seq_len=2048)) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["consumed"] == 256
    for one in (None, state):
        measured = resume.start_once("tokens", str(tmp_path / "tokens"), None, one)
        assert measured["first_batch_s"] > 0
        assert measured["fetched_mb"] > 0


def test_a_ratio_is_that_of_the_medians() -> None:
    fresh, resumed = (
        [{"first_batch_s": seconds, "cpu_s": 1.0, "fetched_mb": 2.0} for seconds in times]
        for times in ([1.0, 9.0, 2.0], [3.0, 3.0, 0.5])
    )
    told = resume.summarise(fresh, resumed)
    assert told["fresh"]["first_batch_s"] == [1.5, 2.0, 5.5]
    assert told["ratio"] == pytest.approx(1.5)
    assert told["cpu_ratio"] == 1.0
