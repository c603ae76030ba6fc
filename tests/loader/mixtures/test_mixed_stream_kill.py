"""A run of a mixture that filters, killed and resumed on other ranks with other sources, under the audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mixed_rows import write_rows
from torchrun import run_ranks

from penstock import audit

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("stream_kill_worker.py")
SIZES = {"a": 90, "b": 70, "c": 60}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_with_other_ranks_and_sources_and_every_sample_is_delivered_or_dropped(
    tmp_path: Path,
) -> None:
    for name, size in SIZES.items():
        write_rows(tmp_path / name, [size // 2, size // 2])
    killed = run_ranks(3, WORKER, tmp_path, 1_000_000, 26)
    assert killed.returncode
    saved = json.loads((tmp_path / "state.json").read_text())
    assert 16 <= saved["mixture"]["here"][1] <= 25
    resumed = run_ranks(2, WORKER, tmp_path, 60, -1)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    report = audit(tmp_path / "audit")
    assert report.is_exact, report
    assert report.mixture is not None
    assert report.attempts[0][0] == 3
    end = json.loads((tmp_path / "state.json").read_text())
    first, then = ([source["taken"] for source in state["sources"]] for state in (saved, end))
    assert sum(then) - sum(first) == 60 * 12
    by_source = {source.name: source for source in report.mixture.sources}
    assert [by_source[name].delivered for name in "abc"] == then
    for name, kept in (("a", 60), ("b", 70), ("c", 30)):
        source = by_source[name]
        dropped = SIZES[name] - kept
        assert dropped * (source.epochs - 1) <= source.dropped <= dropped * source.epochs
    assert by_source["a"].replayed + by_source["b"].replayed > 0
    assert abs((then[0] - first[0]) - 144) <= 2  # 0.5 : 1 : 1 of 720
