"""``penstock plan`` and ``penstock audit``, as a person and as a program run them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader, TokensFormat
from penstock.cli import run


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out, _ = call(capsys, *arguments, "--json")
    return code, json.loads(out)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for number in range(3):
        np.arange(8 * 100, dtype=np.uint16).tofile(folder / f"{number}.bin")
    return folder


MADE_UP = ("plan", "--samples", 100_000, "--shards", 50, "--sample-bytes", 20_000)


@pytest.mark.slow
def test_plan_of_a_share_counts_its_samples_and_the_chunks_that_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    plan = (*MADE_UP, "--world-size", 4, "--batch-size", 10)
    (whole,), (half,), (few,) = (
        call_json(capsys, *plan, *share)[1] for share in ((), ("--share", 0, 0.5), ("--share", 0.999, 1))
    )
    assert abs(half["samples"] - 50_000) < 800  # five standard deviations of a binomial
    assert half["batches_per_rank"] == half["samples"] // 40
    assert (half["chunks"], half["bytes"]) == (whole["chunks"], whole["bytes"])
    assert few["chunks"] <= few["samples"] < 160
    code, _, err = call(capsys, *plan, "--share", 0.5, 0.4)
    assert code
    assert "0 <= start < stop <= 1" in err


@pytest.mark.slow
def test_plan_compares_world_sizes_of_a_made_up_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *MADE_UP, "--world-size", 1, 8, 1024, "--batch-size", 32)
    assert code == 0
    (ranks,) = [line.split() for line in out.splitlines() if line.strip().startswith("ranks")]
    assert ranks == ["ranks", "1", "8", "1,024"]
    lines = {re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:] for line in out.splitlines()}
    assert lines["global batch"] == ["32", "256", "32,768"]
    assert lines["batches per rank"] == ["3,125", "390", "3"]
    assert lines["read amplification"] == ["1.00", "1.00", "1.00"]
    assert lines["skew of an epoch, samples"] == ["0", "0", "0"]


@pytest.mark.slow
def test_plan_shows_the_ranks_that_can_be_beside_the_reason_for_those_that_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("plan", "--samples", 1000, "--shards", 10, "--world-size", 1, 64, "--batch-size", 32)
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    told = " ".join(out.split())
    assert "batches per rank 31 –" in told
    assert "64 ranks: a global batch of 2048 is above the data set's 1000 samples" in told
    assert "use a smaller batch, or --last-batch pad or partial" in told
    assert "samples left out of an epoch 8 –" in told
    _, (good, bad) = call_json(capsys, *arguments)
    assert (good["batches_per_rank"], bad["world_size"], "--last-batch drop" in bad["error"]) == (31, 64, True)


@pytest.mark.parametrize(
    ("last_batch", "row"),
    [("pad", "samples repeated to fill up an epoch 24"), ("partial", "samples in the last global batch 8")],
)
def test_plan_says_what_the_last_batch_holds(capsys: pytest.CaptureFixture[str], last_batch: str, row: str) -> None:
    out = call(capsys, "plan", "--samples", 1000, "--shards", 10, "--world-size", 1, "--last-batch", last_batch)[1]
    assert row in " ".join(out.split())
    assert f"--last-batch {last_batch}: " in out


@pytest.mark.slow
def test_plan_says_that_chunks_are_too_few_for_the_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*more: object, size: int = 100) -> str:
        given = ("plan", "--samples", 5000, "--shards", 1, "--sample-bytes", size, "--batch-size", 8)
        return " ".join(call(capsys, *given, *more)[1].split())

    small = told("--world-size", 8)
    assert "The data set is one chunk, so its rows are shuffled one by one: on 8 ranks each rank reads" in small
    assert "a chunk is read 8.0 times an epoch. At 488.3 KiB that costs little." in small
    cut = told("--world-size", 8, "--piece", 0)
    assert "The data set is one chunk for up to 32 lanes: on 8 ranks several ranks read parts" in cut
    assert "each chunk up to 8.0 times an epoch. At 488.3 KiB that costs little." in cut
    large = told("--world-size", 8, "--piece", 0, "--lanes", 4096, size=100_000)
    assert "The data set has only 119 chunks for up to 4,096 lanes" in large
    assert "Give fewer lanes with --lanes, or pack it again into more chunks: `penstock pack SOURCE" in large
    for one in (told("--world-size", 8, "--lanes", 1), told("--world-size", 1), told("--world-size", 1, "--piece", 0)):
        assert "chunk for" not in one
        assert "one chunk, so" not in one


@pytest.mark.slow
def test_plan_gives_a_program_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = call_json(capsys, *MADE_UP, "--world-size", 8, 6, "--global-batch-size", 48)
    assert code == 0
    assert [each["world_size"] for each in told] == [8, 6]
    assert {each["batches_per_rank"] for each in told} == {100_000 // 48}
    assert {each["samples"] for each in told} == {100_000}
    assert told[0]["read_amplification"] == 1.0 < told[1]["read_amplification"] < 1.5
    assert told[0]["skew"] == 0


def test_plan_of_a_data_set_that_is_there_reads_its_index(capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
    code, (told,) = call_json(capsys, "plan", tokens, "--seq-len", 8, "--world-size", 2, "--batch-size", 5)
    assert code == 0
    assert (told["samples"], told["shards"], told["batches_per_rank"]) == (300, 3, 30)
    assert told["bytes"] == 3 * 1600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "no source"),
        (("plan", "--samples", 10, "--shards", 11), "samples >= shards >= 1"),
        (("plan", "somewhere", "--samples", 10), "give either a source, or --samples"),
        ((*MADE_UP, "--world-size", 0), "must be at least 1"),
        ((*MADE_UP, "--batch-size", -4), "must be at least 1"),
        ((*MADE_UP, "--lanes", 12), "--lanes 12 is not a power of two; use 16"),
        ((*MADE_UP, "--window", -2), "--window -2"),
        ((*MADE_UP, "--world-size", 10, "--batch-size", 100_000), "is above the data set's 100000 samples"),
    ],
)
def test_plans_that_cannot_be_are_refused_with_what_would_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code != 0
    assert message in " ".join(err.split())
    assert "Traceback" not in out + err


@pytest.fixture
def logs(tokens: Path, tmp_path: Path) -> Path:
    """Of 3 ranks that stop after 7 batches of 18, and of 2 that go on from the state after the 6th."""
    folder = tmp_path / "audit"
    for rank in range(3):
        with open_loader(tokens, folder, rank, 3) as loader:
            batches = iter(loader)
            for _ in range(6):
                next(batches)
            state = loader.state_dict()
            next(batches)
    for rank in range(2):
        with open_loader(tokens, folder, rank, 2) as loader:
            loader.load_state_dict(state)
            for _ in loader:
                pass
    return folder


def open_loader(tokens: Path, folder: Path, rank: int, world_size: int) -> DistributedDataLoader:
    return DistributedDataLoader(
        tokens,
        format=TokensFormat(seq_len=8),
        batch_size=6,
        rank=rank,
        world_size=world_size,
        last_batch="partial",
        lanes=16,
        audit_dir=folder,
    )


def test_audit_proves_a_resumed_run_and_ends_with_zero(capsys: pytest.CaptureFixture[str], logs: Path) -> None:
    code, out, _ = call(capsys, "audit", logs)
    assert code == 0
    assert "every sample reached was delivered exactly once" in " ".join(out.split())
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "3", "0", "0"] in rows
    assert ["2", "2", "0", "108"] in rows
    assert ["0", "300", "300", "300", "0", "0", "18"] in rows


def test_audit_tells_what_was_skipped_on_purpose(
    capsys: pytest.CaptureFixture[str], tokens: Path, tmp_path: Path
) -> None:
    with open_loader(tokens, tmp_path / "skips", 0, 1) as loader:
        batches = iter(loader)
        next(batches)
        loader.skip_batches(2)
        for _ in batches:
            pass
    code, out, _ = call(capsys, "audit", tmp_path / "skips")
    assert code == 0
    assert "every sample reached was delivered exactly once, but for 12 skipped" in " ".join(out.split())
    assert ["0", "300", "300", "288", "0", "0", "0", "12"] in [line.split() for line in out.splitlines()]
    assert call_json(capsys, "audit", tmp_path / "skips")[1]["epochs"][0]["skipped"] == 12


def test_audit_ends_with_one_when_a_ranks_deliveries_are_missing(
    capsys: pytest.CaptureFixture[str], logs: Path
) -> None:
    sorted(logs.iterdir())[-1].unlink()
    code, told = call_json(capsys, "audit", logs)
    assert code == 1
    assert not told["ok"]
    (epoch,) = told["epochs"]
    assert epoch["missing"] == 300 - epoch["delivered"] > 0
    code, out, _ = call(capsys, "audit", logs)
    assert code == 1
    assert "missing or were delivered more than once" in " ".join(out.split())


@pytest.mark.parametrize("content", [None, b"no log\n"])
def test_audit_of_a_folder_without_good_logs_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "x.deliveries").write_bytes(content)
    code, out, err = call(capsys, "audit", tmp_path)
    assert code not in (0, 1)
    assert str(tmp_path) in "".join(err.split())
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_plan_simulates_ranks_of_a_made_up_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--samples", "1e8", "--bytes", "100TB", "--world-size", 8, 64, "--simulate", "--steps", 12)
    code, told = call_json(capsys, *arguments, "--store-requests-per-s", 200)
    assert code == 0
    assert [each["world_size"] for each in told] == [8, 64]
    assert told[1]["bound_by"] == "request rate"
    assert told[1]["requests_per_s"] == pytest.approx(200, rel=0.01)
    assert told[1]["lost_to_data"] > 0.5
    out = call(capsys, *arguments)[1]
    assert "bound by" in out
    assert max(map(len, out.splitlines())) <= 80


def test_plan_simulates_ranks_of_a_data_set_that_is_there(capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
    arguments = ("plan", tokens, "--seq-len", 8, "--world-size", 2, 400, "--batch-size", 5, "--simulate")
    code, (good, bad) = call_json(capsys, *arguments, "--latency-s", 2, "--latency-spread", 0)
    assert code == 0
    assert good["first_batch_s"] == pytest.approx(2, rel=0.01)
    assert good["read_amplification"] == pytest.approx(2, rel=0.01)  # by rows: each rank reads all
    assert "--last-batch" in bad["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulate", "--step-s", 0), "--step-s 0: must be above 0"),
        (("--step-s", 3), "--step-s without --simulate"),
        (("--simulate", "--world-size", 5000), "--world-size 5000: simulated are 1 to 4,096 ranks"),
        (("--simulate", "--memory-limit", "10MB"), "--memory-limit"),
        (("--simulate", "--node-bytes-per-s", "fast"), "--node-bytes-per-s='fast' is not a size"),
        (("--simulate", "--last-batch", "pad"), "leave out"),
        (("--simulate", "--global-batch-size", 0), "--global-batch-size 0"),
        (("--global-batch-size", 0), "--global-batch-size 0"),
        (("--lanes", 0), "--lanes 0 is not a power of two"),
        (("--window", 0), "--window 0 chunks: must be at least 1"),
        (("--simulate", "--sample-bytes", 10**22), "at most 2^63 - 1"),
        (("--bytes", "1PB", "--sample-bytes", 7), "give one of them"),
        (("--shards", 2_000_000), "needs samples >= shards"),
    ],
)
def test_plan_refuses_what_it_cannot_simulate(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str
) -> None:
    code, out, err = call(capsys, "plan", "--samples", "1e6", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
