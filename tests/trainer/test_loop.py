from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_trainers import ROWS, Line, add_up, make_trainer, rows, square
from together_cases import spoil
from torch import nn

from penstock.trainer import ArrayLoader, Evaluation, TrainerConfigError, TrainerError, World
from penstock.trainer.data.shares import blend_weights


class Noisy(Line):
    """Randomness in forward: a resumed run must draw what an unbroken one draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(nn.functional.dropout(x, 0.5, self.training))


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.parallel.inner.parameters()])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("broken_at", [1, 3, 4, 5, 8])
def test_a_resumed_run_repeats_nothing_and_ends_bit_equal(world: World, tmp_path: Path, broken_at: int) -> None:
    """Four steps an epoch: 4 and 8 are the moments after an epoch's last step and before its end."""

    def build(**options: Any) -> Any:
        evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
        return make_trainer(world, str(tmp_path), rows(world, with_ids=True), Noisy(), evaluation=evaluation, **options)

    with build(steps=None, epochs=3) as whole:
        expected = whole.train()
        expected_weights = weights_of(whole)
    with build(steps=broken_at, epochs=3) as first:
        first.train()
        state = json.loads(json.dumps(first.state_dict()))
        weights, optimizer = first.parallel.inner.state_dict(), first.optimizer.state_dict()
    with build(steps=None, epochs=3) as second:
        second.parallel.inner.load_state_dict(weights)
        second.optimizer.load_state_dict(optimizer)
        second.load_state_dict(state)
        second.load_state_dict(second.state_dict())
        found = second.train()
        assert torch.equal(weights_of(second), expected_weights)
    assert (found.steps, found.epochs, found.samples) == (expected.steps, expected.epochs, 3 * ROWS)


@pytest.mark.slow
def test_a_checkpoint_made_between_two_epochs_counts_neither_twice(world: World, tmp_path: Path) -> None:
    """The best one is saved after the epoch was counted and evaluated, the others before."""
    found = []
    for epochs in (1, 2, 4):
        options = {
            "evaluation": Evaluation(batches=rows(world, "pad"), metrics=add_up),
            "evaluate": {"best": "number"},
            "checkpoint": {"keep_best": 1, "best": "max"},
            "epochs": epochs,
            "steps": None,
        }
        with make_trainer(world, str(tmp_path), **options) as trainer:
            summary = trainer.train()
        found.append((summary.epochs, summary.steps, summary.samples))
    assert found == [(1, 4, ROWS), (2, 8, 2 * ROWS), (4, 16, 4 * ROWS)]


def test_any_iterable_of_tuples_trains(world: World, tmp_path: Path) -> None:
    x = torch.randn(8, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[0])

    with make_trainer(world, str(tmp_path), loader, loss=loss, steps=None, epochs=2) as trainer:
        summary = trainer.train()
    assert (summary.steps, summary.samples) == (4, 16)


def test_a_spent_iterator_is_an_error_and_no_endless_loop(world: World, tmp_path: Path) -> None:
    batches: Iterator[Any] = iter([])
    with (
        make_trainer(world, str(tmp_path), batches) as trainer,
        pytest.raises(TrainerError, match="gave no batch"),
    ):
        trainer.train()


def test_a_decay_without_a_known_end_asks_for_steps(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match="give steps"):
        make_trainer(world, str(tmp_path), iter([]), steps=None, epochs=1, schedule={"shape": "cosine"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": "auto", "loader": [{"x": torch.ones(2, 2)}]}, "loader=list has no set_shares"),
        ({"shares": "auto", "parallel": {"zero": 2}}, "parallel.zero=2 forward waits"),
        ({"activation": {"every": 2}}, "name their classes with activation.blocks"),
        ({"activation": {"every": 1, "blocks": ["Lin"]}}, "did you mean 'Line'"),
        ({"parallel": {"zero": 3, "blocks": ["Linaer"]}}, "did you mean 'Linear'"),
        ({"compile": {"enabled": True, "cuda_graphs": True}}, "needs a CUDA device, and this is cpu"),
        ({"evaluate": {"every": 3}}, "there is no evaluation"),
        ({"schedule": {"scaling": "sqrt", "base_batch_size": 4}, "loader": [0]}, "needs the effective batch size"),
        ({"model": Line().to(torch.bfloat16)}, "master weights are float32"),
        ({"model": Line().requires_grad_(False)}, "no parameter with requires_grad=True"),
        ({"steps": None}, "neither steps nor epochs"),
        ({"export": "model.safetensors"}, "set checkpoint.every_steps"),
        ({"checkpoint": {"keep_best": 1}}, "name the metric with evaluate.best"),
        ({"average_every": 4, "parallel": {"zero": 1}}, "parallel.zero=1 has one copy in shards"),
        ({"average_every": 4, "compression": {"scheme": "bf16"}}, "exchanges no gradients"),
        ({"average_every": 4, "shares": "auto"}, "count each rank's weights alike"),
        ({"node_average_every": 4}, "needs average_every"),
        ({"compression": {"scheme": "int8"}, "precision": {"dtype": "fp16"}}, "use precision.dtype='bf16'"),
        ({"compression": {"scheme": "topk"}, "step": {"on_nan": "skip"}}, "use step.on_nan='stop'"),
        (
            {"compression": {"scheme": "topk"}, "step": {"clip_norm": 1.0}},
            "step.clip_norm=1.0 with compression.scheme='t",
        ),
        ({"compression": {"scheme": "topk"}, "parallel": {"zero": 2}}, "scheme='topk' needs whole gradients"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    world: World, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerConfigError) as caught:
        make_trainer(world, str(tmp_path), **options)
    assert message in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "new/folder/model.safetensors"])
def test_the_weights_at_the_end_are_exported_to_one_file(world: World, tmp_path: Path, name: str) -> None:
    options = {"export": name, "checkpoint": {"every_steps": 2}}
    with make_trainer(world, str(tmp_path), **options) as trainer:
        trainer.train()
        expected = trainer.parallel.inner.state_dict()
    found = load_file(tmp_path / name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("background", "state"), [(True, "being written"), (False, "written")])
def test_observers_are_told_of_each_checkpoint_once(world: World, tmp_path: Path, background: bool, state: str) -> None:
    options = {"every_steps": 2, "background": background}
    with make_trainer(world, str(tmp_path), checkpoint=options) as trainer:
        trainer.train()
    told = [(one["step"], one["state"]) for one in read_records(tmp_path) if one["kind"] == "checkpoint"]
    assert told == [(2, state), (4, state)]


def test_a_finished_run_is_not_run_again(world: World, tmp_path: Path) -> None:
    for _ in range(2):
        with make_trainer(world, str(tmp_path), checkpoint={"every_steps": 3}) as trainer:
            assert trainer.train().steps == 4
    notes = [record for record in read_records(tmp_path) if record["kind"] == "note"]
    assert [note["note"] for note in notes] == ["resumed from the checkpoint of step 4; the run had ended there"]


def test_a_loader_without_state_says_what_a_resume_cannot_promise(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), [{"x": torch.ones(2, 2)}]) as trainer:
        trainer.train()
    notes = [record["note"] for record in read_records(tmp_path) if record["kind"] == "note"]
    assert len(notes) == 1
    assert "loader=list has no state_dict" in notes[0]
    assert "may come twice" in notes[0]


def test_a_damaged_checkpoint_is_passed_over_with_a_note(world: World, tmp_path: Path) -> None:
    options = {"checkpoint": {"every_steps": 2, "background": False}}
    with make_trainer(world, str(tmp_path), **options) as trainer:
        trainer.train()
    shard = next((tmp_path / "checkpoints" / "step-4").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with make_trainer(world, str(tmp_path), steps=5, **options) as trainer:
        assert trainer.progress.step == 2
        trainer.train()
    notes = [record["note"] for record in read_records(tmp_path) if record["kind"] == "note"]
    assert "the checkpoint of step 4 is damaged and skipped" in notes[0]
    assert notes[1] == "resumed from the checkpoint of step 2"


def test_an_optimizer_over_other_parameters_is_refused(world: World, tmp_path: Path) -> None:
    from penstock.trainer import DistributedTrainer, TrainerConfig

    with pytest.raises(TrainerConfigError, match="1 parameters of group 0 are not the model's"):
        DistributedTrainer(
            Line(),
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
            rows(world),
            TrainerConfig(steps=1, output_dir=str(tmp_path)),
            loss=square,
            world=world,
        )


def test_nan_without_ids_says_how_to_get_them(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), loss=spoil) as trainer, pytest.raises(TrainerError, match="with_ids=True"):
        trainer.train()


def test_a_best_metric_that_is_not_measured_is_named(world: World, tmp_path: Path) -> None:
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
    options = {"evaluation": evaluation, "evaluate": {"best": "acuracy"}, "checkpoint": {"best": "max"}}
    with (
        make_trainer(world, str(tmp_path), **options) as trainer,
        pytest.raises(TrainerConfigError, match="returns"),
    ):
        trainer.evaluate()


@pytest.mark.parametrize(("best_is", "better"), [("max", 12.0), ("min", 12.0)])
def test_the_best_metric_and_its_step_are_remembered(world: World, tmp_path: Path, best_is: str, better: float) -> None:
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
    options = {"evaluate": {"every": 2, "best": "number"}, "checkpoint": {"best": best_is}}
    with make_trainer(world, str(tmp_path), evaluation=evaluation, **options) as trainer:
        summary = trainer.train()
    assert (summary.best, summary.best_step) == (pytest.approx(better), 2)
    assert summary.metrics["number"] == pytest.approx(better)


def test_recomputed_blocks_give_the_same_gradients(world: World, tmp_path: Path) -> None:
    found = []
    for every in (0, 1):
        model = nn.Sequential(Line(), nn.Tanh(), Line())
        options = {"activation": {"every": every, "blocks": ["Line"] if every else []}}
        with make_trainer(world, str(tmp_path), model=model, **options) as trainer:
            trainer.train()
            found.append(weights_of(trainer))
            assert list(model.state_dict()) == ["0.line.weight", "0.line.bias", "2.line.weight", "2.line.bias"]
    assert torch.equal(*found)


def test_recomputed_blocks_keep_fewer_activations() -> None:
    from penstock.trainer import ActivationConfig
    from penstock.trainer.parallel.activation import recompute_activations

    def count_saved(every: int) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
        model = nn.Sequential(nn.ModuleList(model).append(nn.Identity()), nn.Identity())
        blocks = model[0]
        recompute_activations(model, ActivationConfig(every=every))
        saved = []
        x = torch.ones(2, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            for block in blocks:
                x = block(x)
        return len(saved)

    none, half, all_ = count_saved(0), count_saved(2), count_saved(1)
    assert none > half > all_


@pytest.mark.slow
def test_a_compiled_model_trains_alike(world: World, tmp_path: Path) -> None:
    found = []
    for enabled in (False, True):
        options = {"compile": {"enabled": enabled, "backend": "eager"}, "steps": 2}
        loader = rows(world, last_batch="drop")
        with make_trainer(world, str(tmp_path), loader, **options) as trainer:
            trainer.train()
            found.append(weights_of(trainer))
    assert torch.allclose(*found, atol=1e-6)


def test_weights_go_half_way_to_the_measured_speeds_and_never_vanish() -> None:
    assert blend_weights([1.0, 1.0], [30.0, 10.0]) == pytest.approx([1.25, 0.75])
    assert blend_weights([1.0, 1.0], [0.0, 10.0]) == pytest.approx([1.0, 1.0])
    assert min(blend_weights([1.9, 0.1], [1000.0, 1e-9])) > 0.05


def test_an_array_loader_gives_the_same_global_batches_to_any_number_of_ranks() -> None:
    def batches(size: int) -> list[list[int]]:
        loaders = [
            ArrayLoader({"n": range(23)}, global_batch_size=6, last_batch="partial", rank=rank, world_size=size)
            for rank in range(size)
        ]
        return [[int(n) for part in parts for n in part["n"]] for parts in zip(*loaders, strict=True)]

    assert batches(1) == batches(2) == batches(5)
    assert sorted(n for batch in batches(1) for n in batch) == list(range(23))


def test_an_array_loader_resumes_on_other_ranks_at_the_next_sample() -> None:
    arrays = {"n": range(24)}
    loader = ArrayLoader(arrays, global_batch_size=4, rank=0, world_size=1)
    source = iter(loader)
    seen = [int(n) for _ in range(2) for n in next(source)["n"]]
    state = loader.state_dict()
    for rank in range(2):
        other = ArrayLoader(arrays, global_batch_size=4, rank=rank, world_size=2)
        other.load_state_dict(state)
        seen += [int(n) for batch in other for n in batch["n"]]
    assert sorted(seen) == list(range(24))


@pytest.mark.parametrize(("other", "told"), [({"rows": 30}, "rows=24"), ({"shuffle": False}, "shuffle=True")])
def test_an_array_loader_refuses_a_state_of_another_order(other: dict[str, Any], told: str) -> None:
    def build(rows: int = 24, shuffle: bool = True) -> ArrayLoader:
        return ArrayLoader({"n": range(rows)}, global_batch_size=4, shuffle=shuffle, rank=0, world_size=1)

    state = build().state_dict()
    with pytest.raises(TrainerConfigError, match=f"taken with {told} and this loader has"):
        build(**other).load_state_dict(state)
    build(**other).load_state_dict({key: state[key] for key in ("version", "seed", "epoch", "consumed")})


@pytest.mark.parametrize(
    ("trained", "evaluated", "problem"),
    [
        (["ant", "cat", "dog"], ["cat", "dog"], "class 0 is 'ant' in the training data and 'cat' in the evaluation's"),
        (["ant", "cat", "dog"], ["ant", "cat"], None),
        (["ant", "cat"], None, None),
        (7, ["ant"], None),
    ],
)
def test_an_evaluation_whose_classes_have_other_numbers_is_told(
    trained: Any, evaluated: Any, problem: str | None, world: World, tmp_path: Path
) -> None:
    loader, batches = rows(world), rows(world, "pad")
    for each, names in ((loader, trained), (batches, evaluated)):
        each.dataset = SimpleNamespace(classes=names)  # type: ignore[attr-defined]
    with make_trainer(world, str(tmp_path), loader, evaluation=Evaluation(batches=batches, metrics=add_up)) as trainer:
        trainer.train()
    notes = [record["note"] for record in read_records(tmp_path) if record["kind"] == "note"]
    assert [problem in note for note in notes] == ([True] if problem else [])
