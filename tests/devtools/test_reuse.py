"""The tool that looks for wrong bytes in memory that is used again finds them, and none where there are none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from devtools.reuse.__main__ import run_one
from devtools.reuse.held import Tally
from devtools.reuse.place import Place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_programme_finds_values_that_are_not_the_samples_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, tally = Place(tmp_path, ["tokens"]), Tally()
    assert not run_one(2, place, tmp_path, tally, math.inf)
    assert min(tally.values, tally.looks, len(tally.ways)) > 0
    known = place.known["tokens"]
    place.known["tokens"] = replace(known, value=lambda name, sample_id: known.value(name, sample_id ^ 1))
    assert run_one(2, place, tmp_path, tally, math.inf)
    assert "programme 2: WrongValueError: tokens of" in capsys.readouterr().out
