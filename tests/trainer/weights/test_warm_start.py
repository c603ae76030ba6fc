"""A warm start takes weights and buffers from elsewhere, and nothing else, at any zero stage on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import save_file
from small_trainers import make_trainer, rows
from tied_model import Scaled, Tied, initialise_scaled, whole_state

from penstock.trainer import CheckpointError, CheckpointMismatchError, TrainerConfigError, World, build_on_meta

pytestmark = pytest.mark.slow

SAVES = {"checkpoint": {"every_steps": 2}}


def train_base(world: World, folder: str, *, zero: int = 0) -> dict[str, torch.Tensor]:
    """A run that saves; returns its last state."""
    torch.manual_seed(1)
    trainer = make_trainer(world, folder, rows(world, "drop"), Tied(Scaled), parallel={"zero": zero}, **SAVES)
    with trainer:
        trainer.train()
        return whole_state(trainer.parallel.inner)


def write_hf(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Two files and an index, as transformers has them: names with a prefix, bf16, tied weights once."""
    folder.mkdir()
    named = {f"model.{name}": one for name, one in state.items() if name not in ("last.weight", "middle.shift")}
    named = {name: one.bfloat16() if one.is_floating_point() else one for name, one in named.items()}
    weight_map = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(named.items())[number - 1 :: 2])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")


def begin(world: World, folder: str, source: str, zero: int, *, meta: bool = False, **options: Any) -> Any:
    """The state that a run starts with, and where it stands."""
    torch.manual_seed(5)
    model = build_on_meta(Tied, Scaled) if meta else Tied(Scaled)
    options |= {"initialise": initialise_scaled} if meta else {}
    with make_trainer(
        world, folder, rows(world, "drop"), model, parallel={"zero": zero}, init_from=source, **options
    ) as trainer:
        place = (trainer.progress.step, trainer.progress.samples, trainer._feed.loader.epoch, trainer.optimizer.state)
        return whole_state(trainer.parallel.inner), place[:3], len(place[3])


def begin_everywhere(world: World, folder: str, base: str, cases: list[tuple[int, bool]]) -> Any:
    sources = {"run": {}, "whole.safetensors": {}, "hf": {"warm_start": {"rename": ["^model[.]=>"]}}}
    return {
        (source, zero, meta): begin(
            world, f"{folder}/{source}-{zero}-{meta}", f"{base}/{source}", zero, meta=meta, **more
        )
        for source, more in sources.items()
        for zero, meta in cases
    }


def test_weights_and_buffers_come_from_a_run_a_file_or_a_folder_of_shards(world: World, tmp_path: Path) -> None:
    state = train_base(world, str(tmp_path / "run"), zero=2)
    stored = {name: one for name, one in state.items() if name != "middle.shift"}  # not persistent
    save_file({name: one.clone() for name, one in stored.items()}, tmp_path / "whole.safetensors")
    write_hf(state, tmp_path / "hf")
    found = [begin_everywhere(world, str(tmp_path / "1"), str(tmp_path), [(0, False), (3, True)])]
    cases = [(0, False), (1, True), (2, False), (3, False), (3, True)]
    found += run_ranks(begin_everywhere, 3, str(tmp_path / "3"), str(tmp_path), cases)
    for by_case in found:
        for (source, *_), (begun, place, states) in by_case.items():
            assert place == (0, 0, 0)
            assert states == 0
            assert begun.keys() == state.keys()
            for name, one in state.items():
                wanted = one.bfloat16().float() if source == "hf" and one.is_floating_point() else one
                assert torch.equal(begun[name], wanted), name


def test_a_run_that_resumes_ignores_it_and_says_so(world: World, tmp_path: Path) -> None:
    train_base(world, str(tmp_path / "base"))
    mine = str(tmp_path / "mine")
    with make_trainer(world, mine, model=Tied(Scaled), init_from=str(tmp_path / "base"), steps=2, **SAVES) as trainer:
        trainer.train()
        trained = whole_state(trainer.parallel.inner)
    shutil.rmtree(tmp_path / "base")
    again = make_trainer(world, mine, model=Tied(Scaled), init_from=str(tmp_path / "base"), steps=2, **SAVES)
    with again:
        assert again.progress.step == 2
        resumed = whole_state(again.parallel.inner)
    assert all(torch.equal(resumed[name], trained[name]) for name in trained)
    notes = (tmp_path / "mine/metrics.jsonl").read_text()
    assert "weights come from" in notes
    assert "is ignored: the run resumes from its own checkpoint" in notes


def scored(world: World, folder: str) -> list[dict[str, torch.Tensor]]:
    """A run whose second evaluation is the best, of four; the state at each."""
    from penstock.trainer import Evaluation

    states: list[dict[str, torch.Tensor]] = []

    def score(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        model(batch["x"])
        states.append(whole_state(model))
        return {"accuracy": (torch.tensor([0.0, 0.1, 0.9, 0.2, 0.3][len(states)]), 1)}

    evaluation = Evaluation(batches=[next(iter(rows(world)))], metrics=score)
    options = {"evaluate": {"every": 1, "best": "accuracy"}, "checkpoint": {"every_steps": 1, "keep_best": 1}}
    with make_trainer(world, folder, rows(world, "drop"), Tied(Scaled), evaluation=evaluation, **options) as trainer:
        trainer.train()
    return states


def test_the_step_of_a_run_is_chosen(world: World, tmp_path: Path) -> None:
    states = scored(world, str(tmp_path / "run"))
    for step, wanted in (("best", states[1]), ("latest", states[3]), (3, states[2])):
        found, *_ = begin(world, str(tmp_path / f"{step}"), str(tmp_path / "run"), 0, warm_start={"step": step})
        assert torch.equal(found["first.weight"], wanted["first.weight"]), step
    one = str(tmp_path / "run/checkpoints/step-2")
    found, *_ = begin(world, str(tmp_path / "one"), one, 0)
    assert torch.equal(found["first.weight"], states[1]["first.weight"])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; there are those of steps 2, 3, 4"):
        begin(world, str(tmp_path / "none"), str(tmp_path / "run"), 0, warm_start={"step": 7})


def refuse(world: World, tmp_path: Path, source: object, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        begin(world, str(tmp_path / "refused"), str(source), 0, **options)
    return str(caught.value)


def test_what_cannot_be_trusted_is_refused(world: World, tmp_path: Path) -> None:
    state = train_base(world, str(tmp_path / "run"))
    shard = next((tmp_path / "run/checkpoints/step-4").glob("__*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert "is damaged: __0_0.distcp has checksum" in refuse(world, tmp_path, tmp_path / "run")

    state.pop("middle.shift")
    whole = tmp_path / "whole.safetensors"
    save_file({**state, "last.weight": state["last.weight"] + 1}, whole)
    assert "last.weight and first.weight are one tensor in the model and differ" in refuse(world, tmp_path, whole)
    save_file({**state, "last.weight": state["last.weight"].clone(), "norm.bias": torch.full((2,), torch.nan)}, whole)
    assert "norm.bias are not finite" in refuse(world, tmp_path, whole)
    whole.write_bytes(whole.read_bytes()[:-8])
    assert "cannot be read" in refuse(world, tmp_path, whole)

    (tmp_path / "model.bin").write_bytes(b"")
    assert "is a pickle, which can run code" in refuse(world, tmp_path, tmp_path / "model.bin")
    assert "does not exist" in refuse(world, tmp_path, tmp_path / "nowhere")
    index = tmp_path / "bad.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "no safetensors file beside the index" in refuse(world, tmp_path, index)


def test_names_that_differ_are_refused_or_allowed(world: World, tmp_path: Path) -> None:
    state = train_base(world, str(tmp_path / "run"))
    del state["middle.shift"], state["blocks.1.bias"], state["last.weight"]
    state["blocks.2.bias"] = torch.zeros(3)
    state["other"] = torch.zeros(1)
    save_file(state, tmp_path / "whole.safetensors")
    with pytest.raises(CheckpointMismatchError) as caught:
        begin(world, str(tmp_path / "a"), str(tmp_path / "whole.safetensors"), 0)
    for part in (
        "missing there: blocks.1.bias;",
        "not in the model: other;",
        "blocks.2.bias ((3,) there and (2,) here",
    ):
        assert part in str(caught.value)
    allowed = {"allow_missing": ["blocks.*"], "allow_unexpected": ["other"], "allow_mismatched": ["*.bias"]}
    folder, source = str(tmp_path / "b"), str(tmp_path / "whole.safetensors")
    found, *_ = begin(world, folder, source, 3, warm_start=allowed)
    assert torch.equal(found["blocks.1.weight"], state["blocks.1.weight"])
    assert found["blocks.2.bias"].abs().sum() > 0
    assert "2 keep their initial values (blocks.1.bias, blocks.2.bias)" in Path(folder, "metrics.jsonl").read_text()


def differ(world: World, folder: str) -> str:
    """Each node has a file of its own, of other weights."""
    source = f"{folder}/{world.rank}.safetensors"
    state = {
        name: one for name, one in whole_state(Tied(Scaled)).items() if name not in ("middle.shift", "last.weight")
    }
    save_file({name: torch.full_like(one, world.rank + 1) for name, one in state.items()}, source)
    try:
        begin(world, f"{folder}/run", source, 3)
    except CheckpointError as exc:
        return str(exc)
    return "accepted"


def test_ranks_that_see_other_bytes_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in run_ranks(differ, 2, str(tmp_path)):
        assert "rank 1 sees other bytes there than rank 0" in told


def test_what_a_file_holds_needs_no_initialiser(world: World, tmp_path: Path) -> None:
    """Of the meta device, what is loaded is written; what no file holds is refused still."""
    train_base(world, str(tmp_path / "run"))
    with pytest.raises(TrainerConfigError) as caught:
        make_trainer(world, str(tmp_path / "a"), model=build_on_meta(Tied, Scaled), init_from=str(tmp_path / "run"))
    assert "middle.shift (Scaled has no reset_parameters)" in str(caught.value)
    assert "middle.scale" not in str(caught.value)
    resumed = make_trainer(
        world, str(tmp_path / "run"), model=build_on_meta(Tied, Scaled), initialise=initialise_scaled, **SAVES
    )
    with resumed:
        assert resumed.progress.step == 4


def test_options_without_a_source_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match="init_from not from where"):
        make_trainer(world, str(tmp_path), warm_start={"step": "best"})
