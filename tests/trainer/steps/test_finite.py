"""What is not finite reaches neither weights nor checkpoints, and a skipped step leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch_ranks import run_ranks
from small_trainers import Line, cliff, make_trainer, rows
from torch import nn

from penstock.trainer import NonFiniteLossError, TrainerError, World
from penstock.trainer.data.batches import sample_ids
from penstock.trainer.steps.finite import any_not_finite, name_not_finite

CPU = torch.device("cpu")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.line = Line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(x))


class Centred(nn.Module):
    """Assigns its mean anew in forward, as running statistics by hand do; the optimizer has only ``line``."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(2, 2)
        self.line = Line()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.line(self.shift(x) - self.mean)


def meet_bad_gradients(world: World, folder: str, zero: int, policy: str) -> Any:
    options = {"step": {"on_nan": policy}, "parallel": {"zero": zero}, "checkpoint": {"every_steps": 1}, "steps": 4}
    with make_trainer(world, folder, rows(world, shuffle=False), loss=cliff, **options) as trainer:
        try:
            trainer.train()
        except TrainerError as exc:
            return str(exc), trainer.progress.step
        weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in trainer.parallel.inner.parameters()]
        return all(bool(weight.isfinite().all()) for weight in weights), trainer.progress.updates


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_gradient_that_is_not_finite_stops_every_rank_by_name(tmp_path: Path, zero: int) -> None:
    for told, step in run_ranks(meet_bad_gradients, 2, str(tmp_path), zero, "stop"):
        assert "line.weight" in told
        assert "the loss is finite" in told
        assert step == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1"]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_with_such_a_gradient_is_skipped_if_asked(tmp_path: Path, zero: int) -> None:
    for finite, updates in run_ranks(meet_bad_gradients, 2, str(tmp_path), zero, "skip"):
        assert finite
        assert updates == 3


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_a_skipped_step_leaves_no_trace(world: World, tmp_path: Path, where: str) -> None:
    """A run over good batches and one bad one ends as a run over the good ones."""
    good = [{"x": torch.randn(4, 2), "number": torch.zeros(4)} for _ in range(3)]
    bad = {
        "x": torch.full((4, 2), torch.nan) if where == "input" else torch.randn(4, 2),
        "number": torch.full((4,), 9.0),
    }
    found = []
    for name, batches in (("good", good), ("bad", [good[0], bad, *good[1:]])):
        torch.manual_seed(0)
        options = {"step": {"on_nan": "skip"}, "steps": len(batches), "schedule": {"shape": "constant"}}
        with make_trainer(world, str(tmp_path / name), batches, Normed(), loss=cliff, **options) as trainer:
            trainer.train()
            found.append({key: value.clone() for key, value in trainer.parallel.inner.state_dict().items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("zero", [0, 3])
def test_nor_in_buffers_that_are_assigned_and_in_parameters_without_an_optimizer(
    world: World, tmp_path: Path, zero: int
) -> None:
    torch.manual_seed(0)
    good = [{"x": torch.randn(4, 2)} for _ in range(3)]
    bad = {"x": torch.full((4, 2), torch.nan)}
    found = []
    for name, batches in (("good", good), ("bad", [good[0], bad, *good[1:]])):
        torch.manual_seed(0)
        model = Centred()
        options = {
            "step": {"on_nan": "skip", "max_skipped": 1},
            "steps": len(batches),
            "schedule": {"shape": "constant"},
            "parallel": {"zero": zero},
            "optimizer": torch.optim.SGD(model.line.parameters(), lr=0.1),
        }
        with make_trainer(world, str(tmp_path / name), batches, model, **options) as trainer:
            trainer.train()
            state = trainer.parallel.inner.state_dict()
            found.append({key: getattr(one, "full_tensor", one.clone)() for key, one in state.items()})
            assert all(one.grad is None for one in trainer.parallel.inner.parameters())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_weights_that_are_not_finite_are_not_saved(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), checkpoint={"every_steps": 1}) as trainer:

        def burst(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if trainer.progress.step == 2:
                optimizer.param_groups[0]["params"][1].data[0] = torch.inf

        trainer.optimizer.register_step_post_hook(burst)
        with pytest.raises(NonFiniteLossError, match=r"step 3: the weights line\.bias are not finite"):
            trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]


class Causal(nn.Module):
    """Holds its mask of -inf as a frozen parameter, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.mask = nn.Parameter(torch.triu(torch.full((2, 2), -torch.inf), 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        return torch.softmax(y[:, None] + self.mask, -1).sum(1) + y


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_frozen_mask_of_infinities_is_saved_and_a_weight_beside_it_that_is_not_finite_is_refused(
    world: World, tmp_path: Path, zero: int
) -> None:
    options = {"checkpoint": {"every_steps": 1, "keep_last": 9}, "parallel": {"zero": zero}}
    for steps in (2, 4):  # and goes on from a checkpoint with it
        with make_trainer(world, str(tmp_path / "run"), model=Causal(), steps=steps, **options) as trainer:
            trainer.train()
    with make_trainer(
        world, str(tmp_path / "warm"), model=Causal(), init_from=str(tmp_path / "run"), **options
    ) as warm:
        with torch.no_grad():
            weight = warm.parallel.inner.line.line.bias
            getattr(weight, "to_local", lambda: weight)()[0] = torch.inf
        with pytest.raises(NonFiniteLossError, match="loss is not finite"):
            warm.train()
        with pytest.raises(NonFiniteLossError, match=r"the weights line\.line\.bias are not finite"):
            warm._saver.save(1, warm._gather_state(), blocking=True)


def test_a_frozen_parameter_that_gets_infinite_is_not_saved(world: World, tmp_path: Path) -> None:
    model = Causal()
    nn.init.zeros_(model.mask)
    with make_trainer(world, str(tmp_path), model=model, checkpoint={"every_steps": 1}) as trainer:
        model.mask[0, 1] = -torch.inf
        with pytest.raises(NonFiniteLossError, match="the weights mask are not finite"):
            trainer.train()


def test_gradients_that_overflow_at_any_loss_scale_stop_training(world: World, tmp_path: Path) -> None:
    batches = [{"x": torch.ones(1, 2), "number": torch.full((1,), 9.0)}] * 200
    options = {"precision": {"dtype": "fp16"}, "steps": 200, "schedule": {"shape": "constant"}}
    with (
        make_trainer(world, str(tmp_path), batches, loss=cliff, **options) as trainer,
        pytest.raises(NonFiniteLossError, match="not finite at any scale"),
    ):
        trainer.train()
    assert trainer.progress.step < 60


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=4), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_flag_says_what_a_look_at_each_element_says(values: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(one, dtype=torch.float32).to(dtype) for one in values]
    expected = any(not bool(tensor.isfinite().all()) for tensor in tensors)
    assert bool(any_not_finite(tensors, CPU)) == expected
    assert bool(name_not_finite((str(i), tensor) for i, tensor in enumerate(tensors))) == expected


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # by torch 2.11, of its own calls
def test_sparse_and_whole_tensors_have_flags_too() -> None:
    assert any_not_finite([torch.tensor([1 + 1j, complex(0, torch.nan)])], CPU).item() == 1.0
    sparse = torch.sparse_coo_tensor([[1]], [torch.nan], (3,), check_invariants=True)
    assert any_not_finite([torch.tensor([1, 2]), torch.zeros(0), sparse], CPU).tolist() == [1.0]
    assert any_not_finite([torch.tensor([1, 2]), torch.full((9,), 3e38)], CPU).tolist() == [0.0]


def test_sample_ids_of_packed_sequences_are_those_of_their_documents() -> None:
    ids = torch.tensor([[3, 4], [5, -1], [3, 4]])
    assert sample_ids({"__id__": ids, "__valid__": torch.tensor([True, True, False])}) == [3, 4, 5]
    assert sample_ids({"__id__": torch.tensor([7, 8])}) == [7, 8]
