"""Samples of a profiler are charged to the stage that worked, and to none where a thread waits or imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from devtools.profiles import STAGES, by_function, by_stage, plot_profiles, read_stacks, stage_of
from penstock.loader.errors import ConfigError

_MAIN = "<module> (penstock/benchmarks/single_pass.py:1)"
_READ = "read_once (penstock/benchmarks/single_pass.py:20)"
_THREAD = "Thread._bootstrap (threading.py:988)"
_LOAD = "ChunkSource.load (penstock/loader/reading/chunk_source.py:200)"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        ((_MAIN, _READ), "consumer"),
        ((_MAIN, _READ, "__init__ (/any/where/penstock/loader/data_loader.py:9)"), "start, and all else"),
        ((_MAIN, "import_module (importlib/__init__.py:100)", "x (penstock/loader/order/plan.py:1)"), None),
        ((_THREAD, _LOAD, "xxh3_64 (penstock/storage/hashing.py:8)"), "checksums"),
        (
            (_THREAD, _LOAD, "jump_headers (penstock/loader/formats/tar/blocks.py:50)", "_any (numpy/x.py:1)"),
            "opening chunks",
        ),
        ((_THREAD, _LOAD, "_pread (penstock/storage/clients/local.py:210)"), "reading"),
        ((_THREAD, "gather (penstock/loader/decoding/gather.py:62)"), "making batches"),
        ((_THREAD, _LOAD, "Condition.wait (threading.py:295)"), None),
        ((_THREAD, "someone_elses (other/package.py:3)"), None),
    ],
)
def test_a_stack_belongs_to_the_stage_of_its_innermost_frame_in_the_package(
    stack: tuple[str, ...], stage: str | None
) -> None:
    assert stage_of(stack) == stage


def test_stages_share_what_was_seen_of_passes_and_functions_name_where_it_ended() -> None:
    gather = "gather (penstock/loader/decoding/gather.py:62)"
    text = f"{_MAIN};{_READ} 1\n{_THREAD};{gather} 2\n{_THREAD};{_LOAD};Condition.wait (threading.py:295) 90\n"
    stacks = read_stacks(text + f"{_THREAD};{gather} 1\n")
    shares = by_stage(stacks)
    assert list(shares) == list(STAGES)
    assert {stage: share for stage, share in shares.items() if share} == {"making batches": 0.75, "consumer": 0.25}
    assert by_function(stacks) == {
        "gather penstock/loader/decoding/gather.py:62": 0.75,
        "read_once penstock/benchmarks/single_pass.py:20": 0.25,
    }


def test_samples_of_no_pass_are_no_profile() -> None:
    with pytest.raises(ConfigError, match="--passes"):
        by_stage(read_stacks(f"{_THREAD};someone_elses (other/package.py:3) 4\n"))


@pytest.mark.slow
def test_the_chart_has_a_bar_for_each_checkout(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    side = {"samples_per_s": 1000.0, "cpu_us_per_sample": 7.0, "stages_us": dict.fromkeys(STAGES, 1.0)}
    plot_profiles({"raw": {"before": side, "after": side}}, tmp_path / "profiles.svg")
    drawn = (tmp_path / "profiles.svg").read_text()
    assert drawn.count("7.0 us; 1,000/s") == 2
