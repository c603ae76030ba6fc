"""Checkpoints in an object store, on one in memory: all that holds of a folder, what is fetched, failures, the lock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rewound_runs import batches_to_rows, going_back, records, train
from safetensors.torch import load_file
from saved_nets import assert_same, build, step_once, whole_state
from small_trainers import make_trainer
from stored_checkpoints import keys_in, make_config, named_keys, notes_in, save_steps

from penstock.storage import (
    MemoryStore,
)
from penstock.trainer import (
    CheckpointError,
    CheckpointMismatchError,
    World,
    export_safetensors,
)
from penstock.trainer.__main__ import main
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote import upload
from penstock.trainer.checkpoint.remote.layout import list_stored, read_stored

pytestmark = pytest.mark.usefixtures("staging")


@pytest.mark.parametrize("part_bytes", [300, 32 << 20])
def test_what_was_saved_comes_back_whatever_the_size_of_parts(
    alone: World,
    bucket: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", part_bytes)
    net, optimizer = build()
    step_once(net, optimizer, 1)
    wanted = whole_state(net, optimizer)
    owed = {"owed": torch.arange(5.0)}
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.check_room(net)
        assert checkpoints.load_newest(net, optimizer) is None
        checkpoints.save(1, net, optimizer, {"loader": [1, 2]}, rank_state=owed)
        step_once(net, optimizer, 2)  # after the copy
    other_net, other_optimizer = build()
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(other_net, other_optimizer) == (1, {"loader": [1, 2]})
        assert_same(checkpoints.load_rank_state(), owed)
    assert_same(whole_state(other_net, other_optimizer), wanted)
    assert keys_in(bucket) == named_keys(bucket)
    assert all(info.size <= part_bytes for info in bucket.list("data/"))


@pytest.mark.slow
def test_a_run_trains_resumes_keeps_and_exports_as_with_a_folder(
    world: World, bucket: MemoryStore, tmp_path: Path
) -> None:
    found = []
    for name, folder in (("local", "checkpoints"), ("remote", bucket.url)):
        options = {"every_steps": 2, "keep_last": 2, "folder": folder}
        for steps in (5, 9):
            with make_trainer(
                world, str(tmp_path / name), steps=steps, checkpoint=options, export="weights.safetensors"
            ) as trainer:
                assert trainer.progress.step == (0 if steps == 5 else 5)
                trainer.train()
        found.append(load_file(tmp_path / name / "weights.safetensors"))
    assert_same(found[1], found[0])
    assert list_stored(bucket) == [9, 8]
    assert keys_in(bucket) == named_keys(bucket)
    assert sorted(path.name for path in (tmp_path / "remote").iterdir()) == [
        "metrics.jsonl",
        "ranks",
        "weights.safetensors",
    ]


@pytest.mark.slow
def test_training_goes_back_after_a_loss_spike_as_in_a_folder(
    world: World, bucket: MemoryStore, tmp_path: Path
) -> None:
    """The spike is found after step 14; the checkpoint of step 12 is too near to it, and goes."""
    found = []
    for name, folder in (("local", "checkpoints"), ("remote", bucket.url)):
        run = train(world, tmp_path / name, steps=20, bad=batches_to_rows(14), **going_back(folder))
        (record,) = records(tmp_path / name, "rewind")
        assert (record["step"], record["to_step"]) == (15, 8)
        assert any("the checkpoint of step 12 is deleted" in note for note in notes_in(tmp_path / name))
        found.append((run.steps, run.state, run.average))
    assert found[1] == found[0]
    assert list_stored(bucket) == [20, 16, 12, 8, 4]
    assert keys_in(bucket) == named_keys(bucket)


@pytest.mark.slow
def test_the_command_line_takes_a_url(bucket: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["digits", "--dry-run", "--trainer.checkpoint.every_steps=2", f"--trainer.output_dir={tmp_path}"]
    assert main([*flags, f"--trainer.checkpoint.folder={bucket.url}"]) == 0
    assert f'folder = "{bucket.url}"' in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--trainer.output_dir=s3://bucket/run"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "give a path there, and the URL as checkpoint.folder" in said


@pytest.mark.slow
def test_the_last_and_the_best_are_kept_and_a_step_saved_again_replaces_it(
    alone: World,
    bucket: MemoryStore,
) -> None:
    net, optimizer = build()
    config = make_config(bucket, keep_last=2, keep_best=1, best="max")
    with Checkpointer(config, alone) as checkpoints:
        for step, metric in [(1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, float("nan"))]:
            checkpoints.save(step, net, optimizer, {}, metric=metric)
        checkpoints.save(5, net, optimizer, {"again": True}, metric=0.2)
    assert list_stored(bucket) == [5, 4, 2]
    assert read_stored(bucket, 5).manifest.metric == 0.2
    assert keys_in(bucket) == named_keys(bucket)


@pytest.mark.slow
def test_metrics_of_another_name_or_direction_are_not_compared(alone: World, bucket: MemoryStore) -> None:
    net, optimizer = build()
    config = make_config(bucket, keep_last=1, keep_best=1, best="min")
    for metric, measured in (("loss", [(1, 0.1), (2, 0.2)]), ("error", [(3, 0.5), (4, 0.6)])):
        with Checkpointer(config, alone, metric) as checkpoints:
            for step, value in measured:
                checkpoints.save(step, net, optimizer, {}, metric=value)
    assert list_stored(bucket) == [4, 3]
    with Checkpointer(make_config(bucket, keep_last=1, keep_best=1, best="max"), alone, "error") as checkpoints:
        checkpoints.save(5, net, optimizer, {}, metric=0.1)
    assert list_stored(bucket) == [5]


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_the_store(
    alone: World,
    bucket: MemoryStore,
) -> None:
    save_steps(bucket, alone, 1)
    wider, its_optimizer = build(width=7)
    with (
        Checkpointer(make_config(bucket), alone) as checkpoints,
        pytest.raises(CheckpointMismatchError, match=rf"{bucket.url}/step-1 is of another model: 0\.bias has"),
    ):
        checkpoints.load_newest(wider, its_optimizer)


def test_only_the_parts_that_are_needed_are_fetched(
    alone: World,
    bucket: MemoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", 500)
    net, optimizer = build()
    step_once(net, optimizer, 1)
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
    wanted = {key.removeprefix("model."): value for key, value in whole_state(net, optimizer).items() if "model" in key}
    parts = [info.key for info in bucket.list("data/") if ".distcp" in info.key]
    began = len(bucket.calls)
    export_safetensors(f"{bucket.url}/step-1", tmp_path / "weights.safetensors")
    assert_same(load_file(tmp_path / "weights.safetensors"), wanted)
    fetched = {call.key.removeprefix("run/") for call in bucket.calls[began:] if ".distcp" in call.key}
    assert 5 < len(fetched) < 0.6 * len(parts), "the optimizer's state stays where it is"
    with pytest.raises(CheckpointError, match=r"step-7\.json is missing"):
        export_safetensors(f"{bucket.url}/step-7", tmp_path / "none.safetensors")
    bucket.delete([sorted(fetched)[0]])
    with pytest.raises(CheckpointError, match=f"{bucket.url}/step-1 is damaged: {sorted(fetched)[0]} is missing"):
        export_safetensors(f"{bucket.url}/step-1", tmp_path / "none.safetensors")


def test_what_a_killed_process_fetched_is_deleted_by_the_next(
    alone: World,
    bucket: MemoryStore,
    staging: Path,
) -> None:
    save_steps(bucket, alone, 1)
    dead, of_others = staging / "penstock-checkpoint-dead", staging / "unrelated"
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"left")
    of_others.mkdir()
    net, optimizer = build()
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.load_newest(net, optimizer)
        assert len(list(staging.glob("penstock-checkpoint-*"))) == 1
        assert not dead.exists()
        checkpoints.save(2, net, optimizer, {}, blocking=True)
        assert not list(staging.glob("penstock-checkpoint-*")), "it is given up at the next save"
    assert of_others.exists()
