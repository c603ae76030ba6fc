"""Ranks evaluate and save one model, buffers included, and doing so changes no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer, rows
from torch import nn

from penstock.trainer import Evaluation, Mesh, TrainerConfigError, World
from penstock.trainer.parallel.buffers import share_buffers


class Normed(nn.Module):
    """A batch norm, and a buffer that decides what forward gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.line = Line()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += x.mean(0)
        return self.line(self.norm(x)) * (1 + self.seen.mean())


def state_of(model: nn.Module) -> dict[str, list[float]]:
    whole = {key: getattr(one, "full_tensor", lambda one=one: one)() for key, one in model.state_dict().items()}
    return {key: value.flatten().tolist() for key, value in whole.items()}


def train(world: World, folder: str, **options: Any) -> tuple[dict[str, list[float]], list[Any]]:
    torch.manual_seed(0)
    seen: list[Any] = []

    def look(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen.append([one.flatten().tolist() for one in model.buffers()])
        return {"loss": (model(batch["x"]).sum(), len(batch["x"]))}

    evaluation = Evaluation(batches=rows(world, "pad"), metrics=look)
    with make_trainer(
        world, folder, rows(world, "drop", 9, with_ids=True), Normed(), evaluation=evaluation, **options
    ) as trainer:
        trainer.train()
        return state_of(trainer.parallel.inner), seen


def interrupt_with_saves(world: World, folder: str, options: dict[str, Any]) -> Any:
    """A run without saves and evaluations, one with, and one that is stopped in between and resumed."""
    often = {"checkpoint": {"every_steps": 1}, "evaluate": {"every": 1}}
    plain, _ = train(world, f"{folder}/plain", steps=6, evaluate={"every": 100}, **options)
    saved, seen = train(world, f"{folder}/saved", steps=6, **often, **options)
    train(world, f"{folder}/parts", steps=4, **often, **options)
    resumed, _ = train(world, f"{folder}/parts", steps=6, **often, **options)
    return plain, saved, resumed, seen


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_buffers_are_one_and_saving_them_changes_nothing(tmp_path: Path, zero: int) -> None:
    ranks = run_ranks(interrupt_with_saves, 3, str(tmp_path), {"parallel": {"zero": zero}})
    plain, saved, resumed, seen = ranks[0]
    assert plain["line.line.weight"] == saved["line.line.weight"] == resumed["line.line.weight"]
    for other in ranks[1:]:
        assert other[3] == seen, "ranks evaluated different models"
    assert saved == resumed


def test_what_is_saved_is_what_rank_0_holds(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from penstock.trainer import export_safetensors

    for zero in (0, 3):
        folder = tmp_path / str(zero)
        _, saved, *_ = run_ranks(interrupt_with_saves, 3, str(folder), {"parallel": {"zero": zero}})[0]
        export_safetensors(folder / "saved/checkpoints/step-6", folder / "out.safetensors")
        found = {key: value.flatten().tolist() for key, value in load_file(folder / "out.safetensors").items()}
        assert found == saved


def test_local_sgd_trains_the_same_whenever_it_is_saved_or_evaluated(tmp_path: Path) -> None:
    """The averages come every third step, the saves and evaluations after every one."""
    ranks = run_ranks(interrupt_with_saves, 3, str(tmp_path), {"average_every": 3})
    for plain, saved, *_ in ranks:
        assert plain == saved
    assert all(rank[3] == ranks[0][3] for rank in ranks)


def test_synchronised_batch_norms_are_refused_where_torch_has_none(world: World, tmp_path: Path) -> None:
    with pytest.raises(TrainerConfigError, match=r"parallel\.sync_batchnorm=True: torch has SyncBatchNorm for CUDA"):
        make_trainer(world, str(tmp_path), model=Normed(), parallel={"sync_batchnorm": True})


def share_odd_buffers(world: World) -> tuple[list[Any], int]:
    """What each rank's buffers are after rank 0's came, and the messages that it took."""
    odd = nn.Module()
    values = [torch.tensor(7), torch.tensor([True, False]), torch.eye(2).half().t(), torch.tensor([1 + 2j])]
    for number, value in enumerate([*values, torch.rand(3, 2)[:, :1], torch.zeros(0)]):
        odd.register_buffer(f"b{number}", value * (1 if world.is_first else 0))
    with mock.patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as sent:
        share_buffers(odd.buffers(), Mesh(world))
    return [one.tolist() for one in odd.buffers()], sent.call_count


def test_buffers_of_any_type_come_in_one_message() -> None:
    (first, messages), (second, _) = run_ranks(share_odd_buffers, 2)
    assert first == second
    assert first[0] == 7
    assert messages == 1
