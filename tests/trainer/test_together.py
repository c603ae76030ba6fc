from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_trainers import ROWS


def read(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(3)]


def test_evaluation_counts_each_sample_once_whatever_the_batches(ranks_folder: Path) -> None:
    for results in read(ranks_folder, "evaluate-exactly"):
        assert len(results) == 5
        for found in results:
            assert found["number"] == pytest.approx((ROWS + 1) / 2, rel=1e-12)


def test_evaluation_of_unequal_ranks_counts_each_sample_once(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "evaluate-unequal"):
        assert found["zero0"] == pytest.approx((10 + 20 + 21) / 3)
        assert found["zero3"] == pytest.approx((0 + 10 + 11 + 20 + 21 + 22) / 6)


def test_evaluation_without_a_batch_on_a_sharded_rank_fails_on_every_rank(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "evaluate-unequal"):
        assert "1 ranks have no batch" in found["error"]
        assert "last_batch='pad'" in found["error"]


def test_a_loader_of_unequal_lengths_is_refused_on_every_rank(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "refuse-unequal"):
        assert "[1, 2, 3] batches" in found


def test_an_output_folder_that_cannot_be_is_refused_on_every_rank(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "refuse-output"):
        assert "cannot be written" in found


@pytest.mark.parametrize("zero", [0, 3])
def test_nan_stops_every_rank_with_step_rank_and_sample_ids(ranks_folder: Path, zero: int) -> None:
    for found in read(ranks_folder, "meet-nan"):
        assert "step 1: the loss is not finite (rank 1, microbatch 0, sample ids [8, 9])" in found[f"stop{zero}"]
        assert found[f"stop{zero} progress"] == [1, 1]
        assert found[f"stop{zero} finite"]


@pytest.mark.parametrize("zero", [0, 3])
def test_nan_skips_a_bounded_number_of_updates(ranks_folder: Path, zero: int) -> None:
    for found in read(ranks_folder, "meet-nan"):
        assert "step 5" in found[f"skip{zero}"]
        assert "step.max_skipped=1" in found[f"skip{zero}"]
        assert found[f"skip{zero} progress"] == [5, 4]
        assert found[f"skip{zero} finite"]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_overflows_skip_updates_on_all_ranks_alike_and_do_not_move_the_schedule(ranks_folder: Path, zero: int) -> None:
    ranks = [found[f"zero{zero}"] for found in read(ranks_folder, "scale-losses")]
    assert ranks[0] == ranks[1] == ranks[2]
    found = ranks[0]
    assert found["overflows"] > 2
    assert found["updates"] == 24 - found["overflows"]
    assert found["updates"] > 5
    assert found["scale"] < 2.0**20
    assert found["state"]["scale"] == found["scale"]
    # The last step's rate is that of the update it made, or of the one it failed to make.
    rates = [0.1 * (1 - (update - 4) / 20) for update in (found["updates"] - 1, found["updates"])]
    assert min(abs(found["rate"] - rate) for rate in rates) < 1e-9


def test_a_slow_rank_gets_fewer_samples_and_the_gradients_stay(ranks_folder: Path) -> None:
    ranks = read(ranks_folder, "share-by-speed")
    rows = [found["auto rows"] for found in ranks]
    assert sum(rows) == ROWS
    assert rows[2] < 5
    assert min(rows[:2]) > 7
    assert [found["equal rows"] for found in ranks] == [8, 7, 8]
    for found in ranks:
        for one, other in zip(found["equal"], found["auto"], strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_a_signal_to_one_rank_stops_and_saves_all_in_a_step_and_in_an_evaluation(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "stop-by-signal"):
        assert found["step"] == [True, 4, 4, 6]
        assert found["evaluation"] == [True, 4, 4, 6]


def test_copies_that_train_on_their_own_end_as_one(ranks_folder: Path) -> None:
    ranks = read(ranks_folder, "average-weights")
    assert all(found["own"] for found in ranks)
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]


def test_ranks_agree_on_the_microbatch_that_fits_all_and_their_gradients_stay(ranks_folder: Path) -> None:
    ranks = read(ranks_folder, "fit-memory")
    for found in ranks:
        assert found["state"] == {"rows": 2, "tried": 6, "memory": ["cpu, fp32, recomputed: 0"], "alone": False}
        assert found["adaptive"] == found["by hand"] == ranks[0]["adaptive"]
        for way in ("whole", "zero 1", "zero 3"):
            for one, other in zip(found[way], found["by hand"], strict=True):
                assert one == pytest.approx(other, rel=1e-5)


def test_compressed_gradients_send_as_few_bytes_as_their_scheme_says(ranks_folder: Path) -> None:
    for found in read(ranks_folder, "compress-gradients"):
        assert found["int8-0"] < 0.27
        assert found["powersgd-0"] < 0.95
        assert found["topk-0"] < 0.05
        assert found["bf16-2"] == 0.5


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_norm_without_clipping_is_that_with_it_and_the_same_for_every_zero_stage(
    ranks_folder: Path, zero: int
) -> None:
    found = read(ranks_folder, "take-norms")[0]
    norms = [record["gradient_norm"] for record in found[f"free{zero}"]]
    assert len(norms) == 4
    assert min(norms) > 0
    assert norms == pytest.approx([record["gradient_norm"] for record in found[f"clipped{zero}"]], rel=1e-6)
    assert norms == pytest.approx([record["gradient_norm"] for record in found["free0"]], rel=1e-6)


def test_mfu_is_that_of_the_mean_device(ranks_folder: Path) -> None:
    for record in read(ranks_folder, "take-norms")[0]["free0"]:
        assert record["flops_per_s"] == pytest.approx(6.0 * record["samples_per_s"] / 3, rel=1e-9)
        assert record["mfu"] == pytest.approx(record["flops_per_s"] / 1e3, rel=1e-9)
