"""Saving and resuming leave the optimizer as it is: its weights, its steps, and the settings that were given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, rows, square

from penstock.trainer import CheckpointMismatchError, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config
from penstock.trainer.run import saver


class Stubborn(torch.optim.Optimizer):
    """Decays weights at a rate of its own, whatever ``lr`` says, and counts its steps in a group and as a plain int."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0]["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
                    parameter.mul_(0.9).sub_(parameter.grad, alpha=0.1 / state["seen"])


def make(
    world: World, folder: str, optimizer: Any, model: torch.nn.Module | None = None, **options: Any
) -> DistributedTrainer:
    values = {
        "steps": 4,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every_steps": 2},
        "report": {"quiet": True},
        **options,
    }
    return DistributedTrainer(
        model or Line(),
        optimizer,
        rows(world, with_ids=True),
        build_config(TrainerConfig, values),
        loss=square,
        world=world,
    )


def weights_of(trainer: DistributedTrainer) -> torch.Tensor:
    return torch.cat(
        [
            (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().flatten()
            for parameter in trainer.parallel.inner.parameters()
        ]
    )


def save_before_the_first_step(world: World, folder: str, zero: int) -> list[list[float]]:
    found = []
    for name, saves in (("plain", False), ("saved", True)):
        with make(world, f"{folder}/{name}", Stubborn, parallel={"zero": zero}) as trainer:
            if saves:
                trainer._saver.save(trainer.progress.step, trainer._gather_state(), blocking=True)
                assert not trainer.optimizer.state
            trainer.train()
            found.append(weights_of(trainer).tolist())
    with make(world, f"{folder}/unsteady", Stubborn, parallel={"zero": zero}) as trainer:
        trainer._saver.save(trainer.progress.step, trainer._gather_state(), blocking=True)
    with make(world, f"{folder}/unsteady", Stubborn, parallel={"zero": zero}) as trainer:
        trainer.train()
        found.append(weights_of(trainer).tolist())
    return found


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_save_before_the_first_step_changes_no_training(tmp_path: Path, zero: int) -> None:
    for plain, saved, resumed in run_ranks(save_before_the_first_step, 2, str(tmp_path), zero):
        assert saved == plain
        assert resumed == plain


@pytest.mark.slow
def test_an_optimizer_that_ignores_its_rate_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path / "whole"), Stubborn) as whole:
        whole.train()
        expected = weights_of(whole)
    with make(world, str(tmp_path / "parts"), Stubborn, steps=2) as first:
        first.train()
    with make(world, str(tmp_path / "parts"), Stubborn) as second:
        second.train()
        assert torch.equal(weights_of(second), expected)


class Counting(torch.optim.SGD):
    """Keeps no state, and divides its rate by the number of its steps."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.steps)


@pytest.mark.parametrize("zero", [0, 3])
def test_saves_and_resumes_call_no_hooks_of_an_optimizer_and_count_no_steps(
    world: World, tmp_path: Path, zero: int
) -> None:
    called: list[str] = []

    def hooked(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made = Counting(parameters, lr=0.1)
        made.register_step_pre_hook(lambda *_: called.append("before"))
        made.register_step_post_hook(lambda *_: called.append("after"))
        return made

    found = []
    for name, every in (("plain", 0), ("saved", 1)):
        options = {"checkpoint": {"every_steps": every}, "parallel": {"zero": zero}}
        with make(world, str(tmp_path / name), hooked, **options) as trainer:
            trainer.train()
            assert trainer.optimizer.steps == 4  # type: ignore[attr-defined]
            found.append(weights_of(trainer).tolist())
    assert found[0] == found[1]
    assert called == ["before", "after"] * 8
    with make(world, str(tmp_path / "saved"), hooked, parallel={"zero": zero}) as trainer:
        assert trainer.progress.step == 4
        assert trainer.optimizer.steps == 0  # type: ignore[attr-defined]
    assert called == ["before", "after"] * 8


def adam(**settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **settings)


def test_a_resumed_run_takes_the_settings_it_is_given_and_says_what_differs(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), adam(weight_decay=0.5, betas=(0.9, 0.99)), steps=2) as first:
        first.train()
    with make(world, str(tmp_path), adam(weight_decay=0.25, betas=(0.8, 0.99))) as second:
        assert second.optimizer.param_groups[0]["weight_decay"] == 0.25
        assert tuple(second.optimizer.param_groups[0]["betas"]) == (0.8, 0.99)
        assert second._saver.checkpointer is not None
        assert sorted(second._saver.checkpointer.changed_settings) == [
            "optimizer group 0: betas=(0.8, 0.99); the checkpoint had (0.9, 0.99)",
            "optimizer group 0: weight_decay=0.25; the checkpoint had 0.5",
        ]
        assert all(float(state["step"]) == 2 for state in second.optimizer.state.values())
    with make(world, str(tmp_path), adam(weight_decay=0.5, betas=(0.9, 0.99))) as same:
        assert same._saver.checkpointer is not None
        assert same._saver.checkpointer.changed_settings == []


class Adapting(torch.optim.Optimizer):
    """Keeps what it has learnt, and how often it stepped, among its settings, as Prodigy and ScheduleFree do."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, decay: float = 0.1, d: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": 1.0, "decay": decay, "d": d, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["decay"] / group["k"]).sub_(parameter.grad, alpha=group["lr"] * group["d"])


@pytest.mark.slow
def test_what_an_optimizer_learns_among_its_settings_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path / "whole"), Adapting) as whole:
        whole.train()
        expected = weights_of(whole)
    with make(world, str(tmp_path / "parts"), Adapting, steps=2) as first:
        first.train()
    with make(world, str(tmp_path / "parts"), Adapting) as second:
        assert second.optimizer.param_groups[0]["k"] == 2
        assert second._saver.checkpointer is not None
        assert second._saver.checkpointer.changed_settings == []
        second.train()
        assert torch.equal(weights_of(second), expected)


def test_a_setting_that_is_given_anew_replaces_what_was_learnt_and_the_others_stay(
    world: World, tmp_path: Path
) -> None:
    with make(world, str(tmp_path), Adapting, steps=2) as first:
        first.train()
    with make(world, str(tmp_path), lambda parameters: Adapting(parameters, decay=0.2, d=5e-3)) as second:
        group = second.optimizer.param_groups[0]
        assert (group["k"], group["decay"], group["d"]) == (2, 0.2, 5e-3)
        assert second._saver.checkpointer is not None
        assert sorted(second._saver.checkpointer.changed_settings) == [
            "optimizer group 0: d=0.005; the checkpoint had 0.0225",
            "optimizer group 0: decay=0.2; the checkpoint had 0.1",
        ]


def test_a_setting_that_a_run_changed_itself_is_what_it_resumes_with(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), adam(weight_decay=0.5), steps=2) as first:
        first.optimizer.param_groups[0]["weight_decay"] = 0.125
        first.train()
    with make(world, str(tmp_path), adam(weight_decay=0.5)) as second:
        assert second.optimizer.param_groups[0]["weight_decay"] == 0.125


def test_a_checkpoint_that_does_not_tell_what_was_given_takes_the_settings_of_now(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(saver, "copy_settings", lambda optimizer: None)  # as releases of before saved
        with make(world, str(tmp_path), Adapting, steps=2) as first:
            first.train()
    with make(world, str(tmp_path), lambda parameters: Adapting(parameters, decay=0.2)) as second:
        group = second.optimizer.param_groups[0]
        assert (group["k"], group["decay"], group["d"]) == (0, 0.2, 1e-2)
        assert second.progress.step == 2
        assert second._saver.checkpointer is not None
        assert len(second._saver.checkpointer.changed_settings) == 3


Split = Sequence[tuple[slice, dict[str, Any]]]


def grouped(groups: Split, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Callable[..., Any]:
    """An optimizer whose groups have these of the parameters, each with its settings."""

    def make_groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        them = list(parameters)
        return kind([{"params": them[part], **settings} for part, settings in groups])  # type: ignore[call-arg]

    return make_groups


LOW, HIGH = {"weight_decay": 0.125, "lr": 0.02}, {"weight_decay": 0.5, "lr": 0.1}
FIRST, REST, WHOLE = slice(0, 1), slice(1, 9), slice(0, 9)
OTHERWISE: dict[str, tuple[Split, Split, list[str]]] = {
    "in another order": (((FIRST, LOW), (REST, HIGH)), ((REST, HIGH), (FIRST, LOW)), []),
    "exchanged": (
        ((FIRST, LOW), (REST, HIGH)),
        ((REST, LOW), (FIRST, HIGH)),
        [
            "optimizer group 0: weight_decay=0.125; the checkpoint had 0.5",
            "optimizer group 1: weight_decay=0.5; the checkpoint had 0.125",
            "schedule: lr=[0.02, 0.1]; the checkpoint had [0.1, 0.02]",
        ],
    ),
    "split": (
        ((WHOLE, LOW),),
        ((FIRST, HIGH), (REST, LOW)),
        [
            "optimizer group 0: weight_decay=0.5; the checkpoint had 0.125",
            "schedule: lr=[0.1, 0.02]; the checkpoint had [0.02, 0.02]",
        ],
    ),
    "made one": (
        ((FIRST, LOW), (REST, HIGH)),
        ((WHOLE, HIGH),),
        [
            "optimizer group 0: weight_decay=0.5; the checkpoint had 0.125 and 0.5",
            "schedule: lr=[0.1]; the checkpoint had [[0.02, 0.1]]",
        ],
    ),
}


def notes_of(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["note"] for line in lines if "note" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "zero"), [*((case, zero) for case in OTHERWISE for zero in (0, 3)), ("split", 1), ("split", 2)]
)
@pytest.mark.sampled(3)
def test_groups_are_found_by_what_is_in_them_and_have_the_settings_that_are_given(
    world: World, tmp_path: Path, case: str, zero: int
) -> None:
    before, now, notes = OTHERWISE[case]
    options = {"parallel": {"zero": zero}}
    with make(world, str(tmp_path), grouped(before), steps=2, **options) as first:
        first.train()
    with make(world, str(tmp_path), grouped(now), **options) as second:
        wanted = {id(one): settings for part, settings in now for one in list(second.parallel.inner.parameters())[part]}
        for group in second.optimizer.param_groups:
            for one in group["params"]:
                assert (group["weight_decay"], group["lr"]) == tuple(wanted[id(one)].values())
                assert second.optimizer.state[one]["step"] == 2
        found = [note for note in notes_of(tmp_path) if "the checkpoint had" in note]
        assert sorted(found) == notes
        second.train()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_what_groups_have_learnt_among_their_settings_follows_their_parameters(
    world: World, tmp_path: Path, zero: int
) -> None:
    low, high = {"d": 1e-2}, {"d": 2e-2}
    forth, back = ((FIRST, low), (REST, high)), ((REST, high), (FIRST, low))
    options = {"parallel": {"zero": zero}}
    with make(world, str(tmp_path / "whole"), grouped(forth, Adapting), **options) as whole:
        whole.train()
        expected = weights_of(whole)
    with make(world, str(tmp_path / "parts"), grouped(forth, Adapting), steps=2, **options) as first:
        first.train()
    with make(world, str(tmp_path / "parts"), grouped(back, Adapting), **options) as second:
        assert [group["d"] for group in second.optimizer.param_groups] == [2e-2 * 2.25, 1e-2 * 2.25]
        second.train()
        assert torch.equal(weights_of(second), expected)


class Parts(torch.nn.Module):
    """A body and a head, of which the ``frozen`` are not trained."""

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        self.body, self.head = Line(), torch.nn.Linear(2, 1)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


FROZEN = [((), ("body",)), (("body",), ()), (("body",), ("head",)), (("head",), ("body",))]  # then, and now


def of_all(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "now", "zero", "of_trained_alone"),
    [
        *((then, now, zero, zero == 3) for then, now in FROZEN for zero in (0, 3)),
        *((*FROZEN[2], *others) for others in ((0, True), (1, True), (2, False))),
    ],
)
@pytest.mark.sampled(3)
def test_a_resumed_run_may_train_other_parts_and_says_whose_state_is_dropped_and_whose_is_new(
    world: World, tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...], zero: int, of_trained_alone: bool
) -> None:
    def start(frozen: tuple[str, ...], steps: int) -> Any:
        torch.manual_seed(3)
        model, options = Parts(*frozen), {"parallel": {"zero": zero}, "steps": steps}
        optimizer = of_all if of_trained_alone else of_all(model.parameters())
        return make(world, str(tmp_path), optimizer, model=model, **options)

    def weights(trainer: DistributedTrainer) -> dict[str, torch.Tensor]:
        model = trainer.parallel.inner
        return {name: getattr(one, "full_tensor", one.clone)().detach() for name, one in model.named_parameters()}

    with start(then, 2) as first:
        first.train()
        before = weights(first)
    with start(now, 4) as second:
        names = {one: name for name, one in second.parallel.inner.named_parameters()}
        steps = {names[one]: float(state["step"]) for one, state in second.optimizer.state.items()}
        assert steps == dict.fromkeys((name for name in before if not name.startswith((*then, *now))), 2.0)
        tensors = {"body": "body.line.weight, body.line.bias", "head": "head.weight, head.bias"}
        dropped = "the optimizer state of what is no longer trained is dropped: "
        new = "what is newly trained starts without optimizer state: "
        assert [note for note in notes_of(tmp_path) if "optimizer state" in note] == [
            *(dropped + tensors[part] for part in now),
            *(new + tensors[part] for part in then if of_trained_alone),  # others had no gradient yet
        ]
        second.train()
        after = weights(second)
        still = {name for name in after if torch.equal(after[name], before[name])}
        assert still == {name for name in after if name.startswith(now)}


def test_an_optimizer_that_keeps_another_state_is_refused_whatever_is_frozen(world: World, tmp_path: Path) -> None:
    with make(world, str(tmp_path), of_all, model=Parts("body"), steps=2) as first:
        first.train()
    with pytest.raises(CheckpointMismatchError, match=r"another optimizer: head\.bias\.exp_avg is in"):
        make(world, str(tmp_path), lambda parameters: torch.optim.SGD(parameters, lr=0.1), model=Parts("body"))


@pytest.mark.slow
def test_parameters_that_are_grouped_otherwise_keep_their_state_and_take_the_groups_that_are_given(
    world: World, tmp_path: Path
) -> None:
    def grouped(first: int) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
        def make_groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
            them = list(parameters)
            return torch.optim.AdamW([{"params": them[:first]}, {"params": them[first:], "lr": 0.02}], lr=0.1)

        return make_groups

    model = {"model": torch.nn.Sequential(Line(), torch.nn.Linear(2, 1))}
    with make(world, str(tmp_path), grouped(3), **model) as trainer:
        trainer.train()
        expected = [one["exp_avg"].clone() for one in trainer.optimizer.state.values()]
    for first in (1, 2, 3):
        with make(world, str(tmp_path), grouped(first), **model) as trainer:
            assert trainer.progress.step == 4
            found = [trainer.optimizer.state[one]["exp_avg"] for one in trainer.parallel.inner.parameters()]
            assert all(map(torch.equal, found, expected))
            groups = trainer.optimizer.param_groups
            assert [(len(group["params"]), group["lr"]) for group in groups] == [(first, 0.1), (4 - first, 0.02)]


class Pair(torch.nn.Module):
    """Two layers of one weight, or of two."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.last = Line().line, Line().line
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_were_trained_apart_do_not_resume_as_one(
    world: World, tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    for folder, before, now in (("apart", False, True), ("tied", True, True), ("untied", True, False)):
        with make(world, str(tmp_path / folder), kind, Pair(tied=before)) as trainer:
            trainer.train()
        if before:
            make(world, str(tmp_path / folder), kind, Pair(tied=now)).close()
            continue
        with pytest.raises(CheckpointMismatchError, match=r"first\.weight and last\.weight are one weight here"):
            make(world, str(tmp_path / folder), kind, Pair(tied=now))
