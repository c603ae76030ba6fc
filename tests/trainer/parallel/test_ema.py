"""The moving average of the weights: as a naive one says, evaluated, saved and resumed, however training is spread."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_trainers import Line, make_trainer, rows
from together_cases import overflow
from torch import nn

from penstock.cli import run as run_command
from penstock.trainer import (
    CheckpointError,
    EmaConfig,
    Evaluation,
    TrainerConfigError,
    World,
    build_on_meta,
    export_run,
    export_safetensors,
)
from penstock.trainer.parallel.ema import WeightEma
from penstock.trainer.parallel.precision import local_part

State = dict[str, torch.Tensor]
EVERY_STEP = {"every_steps": 1, "keep_last": 99}


class Net(nn.Module):
    """A frozen layer, a batch norm, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.blocks = nn.ModuleList([Line(), Line()])
        self.tied = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = x + 0.3 * block(x)
        return self.head(self.tied(x))


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def whole_state(model: nn.Module) -> State:
    with torch.no_grad():
        found = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    return {name: one.detach().clone() for name, one in found.items()}


def exported(folder: str | Path, step: int, weights: Any) -> State:
    path = Path(folder) / f"{weights}-{step}.safetensors"
    export_safetensors(Path(folder) / "checkpoints" / f"step-{step}", path, weights=weights)
    return load_file(path)


def expect(weights: list[State], config: EmaConfig) -> list[State]:
    """The naive average, in float64, after each of the weights, of which the first are those that training begins with.

    Weights as the step before them were not updated.
    """
    assert config.decay is not None
    average = {name: one.double() for name, one in weights[0].items()}
    found, updates = [], 0
    for before, after in pairwise(weights):
        if any(not torch.equal(before[name], after[name]) for name in after if "weight" in name):
            updates += 1
            if updates % config.every == 0:
                decay = min(config.decay, (1 + updates) / (10 + updates)) if config.warmup else config.decay
                kept = decay**config.every
                average = {name: kept * average[name] + (1 - kept) * one.double() for name, one in after.items()}
        found.append(average)
    return found


def assert_near(found: State, expected: State, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        if one.is_floating_point() and "running" not in name:
            torch.testing.assert_close(one.double(), expected[name], atol=2e-6, rtol=0)


def check_run(folder: str | Path, first: State, steps: int, config: EmaConfig) -> None:
    """Each checkpoint's average is the naive one of the weights in the checkpoints; its buffers are the model's."""
    models = [exported(folder, step, "model") for step in range(1, steps + 1)]
    for step, (model, expected) in enumerate(zip(models, expect([first, *models], config), strict=True), start=1):
        average = exported(folder, step, "ema")
        assert_near(average, expected)
        for name in model:
            if name.startswith("stem") or "running" in name or "num_batches" in name:
                assert torch.equal(average[name], model[name]), name
    assert not torch.equal(average["head.weight"], model["head.weight"])
    assert torch.equal(average["head.weight"], average["tied.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("config", [EmaConfig(decay=0.8), EmaConfig(decay=0.9, warmup=True, every=2)])
def test_the_average_is_the_naive_one(world: World, tmp_path: Path, config: EmaConfig) -> None:
    net = make_net()
    first = whole_state(net)
    ema = {"decay": config.decay, "warmup": config.warmup, "every": config.every}
    step = {"accumulate": 2}
    with make_trainer(world, str(tmp_path), model=net, ema=ema, steps=5, checkpoint=EVERY_STEP, step=step) as trainer:
        trainer.train()
    check_run(tmp_path, first, 5, config)


@pytest.mark.slow
def test_an_update_that_overflows_does_not_move_the_average(world: World, tmp_path: Path) -> None:
    net = make_net()
    first = whole_state(net)
    options: dict[str, Any] = {"precision": {"dtype": "fp16", "init_scale": 2.0**17}, "loss": overflow, "steps": 8}
    with make_trainer(
        world, str(tmp_path), model=net, ema={"decay": 0.5, "warmup": True}, checkpoint=EVERY_STEP, **options
    ) as trainer:
        summary = trainer.train()
    assert summary.overflows
    assert summary.updates
    check_run(tmp_path, first, 8, EmaConfig(decay=0.5, warmup=True))


def look(seen: list[State]) -> Any:
    def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if not seen or len(seen[-1]) == 0:
            seen.append(whole_state(getattr(model, "module", model)))
        return {"loss": (model(batch["x"]).float().sum(), len(batch["x"]))}

    return measure


def train_and_evaluate(
    world: World, folder: str, steps: int, *, own_statistics: bool = True, **options: Any
) -> tuple[State, State]:
    """The weights at the end, and those that an evaluation at the end sees."""
    seen: list[State] = []
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=look(seen))
    options = {"ema": {"decay": 0.8}, "checkpoint": EVERY_STEP, "evaluate": {"every": 99}, **options}
    net = make_net()
    net.norm.train(mode=own_statistics)
    with make_trainer(
        world, folder, rows(world, size=12), net, evaluation=evaluation, steps=steps, **options
    ) as trainer:
        trainer.train()
        trained = [local_part(one).shape for one in trainer.parallel.inner.parameters() if one.requires_grad]
        assert [part.shape for part in trainer._saver.ema.parts()] == trained, "a rank holds more than its shards"
        before = whole_state(trainer.parallel.inner)
        trainer.evaluate()
        after = whole_state(trainer.parallel.inner)
    assert all(torch.equal(before[name], after[name]) for name in before), "the weights did not come back"
    return before, seen[0]


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fail_in_evaluation(world: World, folder: str, **options: Any) -> bool:
    def weights() -> State:
        return {name: one for name, one in whole_state(net).items() if name.endswith(("weight", "bias"))}

    def fail(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        model(batch["x"])
        raise ZeroDivisionError

    evaluation = Evaluation(batches=rows(world, "pad"), metrics=fail)
    options = {"ema": {"decay": 0.8}, "evaluate": {"every": 99}, **options}
    net = make_net()
    with make_trainer(world, folder, rows(world, size=12), net, evaluation=evaluation, **options) as trainer:
        trainer.train()
        before = weights()
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate()
        return same(before, weights())


def run_everywhere(world: World, folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """For each case: an unbroken run, one that is stopped and resumed, and an evaluation that fails."""
    found = {}
    for name, options in cases.items():
        whole, averaged = train_and_evaluate(world, f"{folder}/{name}", 5, **options)
        train_and_evaluate(world, f"{folder}/{name}-parts", 2, **options)
        resumed, resumed_average = train_and_evaluate(world, f"{folder}/{name}-parts", 5, **options)
        found[f"{name}: resumed bit-equal"] = same(whole, resumed) and same(averaged, resumed_average)
        found[f"{name}: back after an error"] = fail_in_evaluation(world, f"{folder}/{name}-error", **options)
        if world.is_first:
            found[f"{name}: evaluated what is exported"] = same(averaged, exported(f"{folder}/{name}", 5, "ema"))
        torch.distributed.barrier()
    return found


CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1": {"parallel": {"zero": 1}},
    "zero3": {"parallel": {"zero": 3}, "precision": {"dtype": "bf16"}},
    "local": {"average_every": 2},
}


def test_averages_are_evaluated_saved_and_resumed_bit_equal(tmp_path: Path) -> None:
    for found in run_ranks(run_everywhere, 2, str(tmp_path), CASES):
        # A run of local SGD that is resumed from a save between two averages goes on from the mean.
        assert [name for name, held in found.items() if not held and name != "local: resumed bit-equal"] == []
    for name in ("zero0", "zero3", "local"):
        check_run(tmp_path / name, whole_state(make_net()), 5, EmaConfig(decay=0.8))


def go_on(world: World, folder: str, steps: int, zero: int) -> tuple[State, State]:
    """Batch norms that normalise by their rank's share would tell worlds apart."""
    return train_and_evaluate(world, folder, steps, own_statistics=False, parallel={"zero": zero})


def test_averages_go_on_on_other_numbers_of_ranks_and_zero_stages(tmp_path: Path) -> None:
    whole = run_ranks(go_on, 3, str(tmp_path / "whole"), 4, 3)[0]
    saved = run_ranks(go_on, 3, str(tmp_path / "parts"), 2, 3)[0]
    shutil.copytree(tmp_path / "parts", tmp_path / "same")
    unchanged = run_ranks(go_on, 2, str(tmp_path / "same"), 2, 2)[0]
    assert same(saved[1], unchanged[1]), "another world reads other averages"
    for found, expected in zip(run_ranks(go_on, 2, str(tmp_path / "parts"), 4, 0)[0], whole, strict=True):
        for name, one in found.items():
            torch.testing.assert_close(one, expected[name], atol=1e-6, rtol=0)


def notes(folder: Path) -> str:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return "\n".join(line["note"] for line in lines if line["kind"] == "note")


@pytest.mark.slow
def test_an_average_switched_on_later_starts_from_the_weights_and_says_so(world: World, tmp_path: Path) -> None:
    for steps, ema in ((2, {}), (4, {"decay": 0.5})):
        with make_trainer(
            world, str(tmp_path), model=make_net(), steps=steps, ema=ema, checkpoint=EVERY_STEP
        ) as trainer:
            trainer.train()
    models = [exported(tmp_path, step, "model") for step in (2, 3, 4)]
    assert_near(exported(tmp_path, 4, "ema"), expect(models, EmaConfig(decay=0.5))[-1])
    assert "the checkpoint has no average of the weights: it starts from the checkpoint's weights" in notes(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-2 holds no averaged weights; train with ema\.decay"):
        exported(tmp_path, 2, "ema")
    with make_trainer(world, str(tmp_path), model=make_net(), steps=4, checkpoint=EVERY_STEP):
        pass
    assert "the checkpoint's average of the weights is dropped" in notes(tmp_path)


def test_a_parameter_unfrozen_later_is_averaged_from_then_on() -> None:
    net = make_net()
    ema = WeightEma(net, EmaConfig(decay=0.5))
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            net.stem.requires_grad_(value > 1)
            net.stem.bias.fill_(value)
            ema.update()
    assert ema.named()["stem.bias"].tolist() == [2.5, 2.5]


@pytest.mark.parametrize(
    "ema", [{"decay": 1.0}, {"decay": -0.1}, {"every": 3}, {"warmup": True}, {"decay": 0.9, "every": 0}]
)
def test_what_would_average_nothing_is_refused(world: World, tmp_path: Path, ema: dict[str, Any]) -> None:
    with pytest.raises(TrainerConfigError, match=r"ema\."):
        make_trainer(world, str(tmp_path), ema=ema)


def test_the_best_checkpoint_and_the_export_are_the_averages(world: World, tmp_path: Path) -> None:
    seen: list[State] = []
    evaluation = Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=look(seen))
    options: dict[str, Any] = {
        "evaluation": evaluation,
        "evaluate": {"every": 4, "best": "loss"},
        "checkpoint": {"keep_best": 1, "every_steps": 9},
        "export": "out.safetensors",
    }
    with make_trainer(world, str(tmp_path), model=make_net(), ema={"decay": 0.8}, **options) as trainer:
        trainer.train()
    assert same(seen[0], load_file(tmp_path / "out.safetensors"))
    assert same(seen[0], exported(tmp_path, 4, "ema"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights"] for line in lines if line["kind"] == "evaluate"] == ["ema"]


@pytest.mark.slow
@pytest.mark.parametrize("build", [make_net, lambda: build_on_meta(Net)], ids=["built", "meta"])
def test_the_average_begins_with_the_weights_that_a_run_starts_from(world: World, tmp_path: Path, build: Any) -> None:
    torch.manual_seed(8)
    first = whole_state(Net())
    save_file(first, tmp_path / "first.safetensors")
    options: dict[str, Any] = {"init_from": str(tmp_path / "first.safetensors"), "ema": {"decay": 0.8}, "steps": 2}
    with make_trainer(world, str(tmp_path), model=build(), checkpoint=EVERY_STEP, **options) as trainer:
        trainer.train()
    check_run(tmp_path, first, 2, EmaConfig(decay=0.8))


def start_from_average(world: World, folder: str) -> State:
    options: dict[str, Any] = {"init_from": folder, "warm_start": {"weights": "ema"}, "parallel": {"zero": 3}}
    with make_trainer(world, f"{folder}/next", model=make_net(), steps=1, **options) as trainer:
        return whole_state(trainer.parallel.inner)


def test_another_run_starts_from_the_average_and_an_export_in_shards_holds_it(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), model=make_net(), ema={"decay": 0.8}, checkpoint=EVERY_STEP) as trainer:
        trainer.train()
        step = trainer.progress.step
    wanted = exported(tmp_path, step, "ema")
    done = export_run(tmp_path, tmp_path / "out", weights="ema", format="hf", max_shard_bytes=64)
    shards = [name for name in done.files if name.endswith(".safetensors")]
    assert len(shards) > 1
    assert same({name: one for file in shards for name, one in load_file(tmp_path / "out" / file).items()}, wanted)
    assert run_command(["export", str(tmp_path), "--weights", "ema", "--output", str(tmp_path / "one")]) == 0
    assert same(load_file(tmp_path / "one" / "model.safetensors"), wanted)
    for found in run_ranks(start_from_average, 2, str(tmp_path)):
        assert same(found, wanted)


def test_a_run_without_averages_has_none_to_export_or_start_from(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path / "run"), model=make_net(), checkpoint=EVERY_STEP, steps=1) as trainer:
        trainer.train()
    export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"step-1 holds no averaged weights; train with ema\.decay"):
        export_run(tmp_path / "run", tmp_path / "none", weights="ema")
    assert not (tmp_path / "none").exists()
    for source, told in (("run", "holds no averaged weights"), ("out", "is no run, and weights='ema' chooses")):
        options: dict[str, Any] = {"init_from": str(tmp_path / source), "warm_start": {"weights": "ema"}}
        with pytest.raises(CheckpointError, match=told):
            make_trainer(world, str(tmp_path / "next"), model=make_net(), **options)
