"""Frozen parts of a model keep their number format, in memory and in files, beside trained parts in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file
from small_trainers import make_trainer, rows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.trainer import Callbacks, StepRecord, TrainerConfigError, World, export_run

FORMATS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64]


class Adapted(nn.Module):
    """A frozen layer in a format of its own, with a trained one of low rank beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).to(dtype).requires_grad_(False)
        self.down = nn.Linear(2, 1, bias=False)
        self.up = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.base.weight, self.base.bias
        if weight.dtype.itemsize == 1:
            weight, bias = weight.float(), bias.float()
        return nn.functional.linear(x.to(weight.dtype), weight, bias).float() + self.up(self.down(x)) + x


class Lora(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Adapted(dtype), Adapted(dtype)])
        self.norm = nn.LayerNorm(2).to(torch.bfloat16 if dtype.itemsize == 1 else dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x.to(self.norm.weight.dtype)).float()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) - 1.0).square().sum(), len(batch["x"])


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def train(world: World, folder: str, dtype: torch.dtype, zero: int, *, precision: str, **options: Any) -> nn.Module:
    model = Lora(dtype)
    with make_trainer(
        world,
        folder,
        rows(world, "drop"),
        model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        precision={"dtype": precision},
        parallel={"zero": zero},
        **options,
    ) as trainer:
        trainer.train()
    return model


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_adapters_on_a_frozen_base_of_any_format_are_trained_alike_at_every_zero_stage(
    world: World, tmp_path: Path, dtype: torch.dtype, precision: str
) -> None:
    before = whole(Lora(dtype))
    expected = whole(train(world, f"{tmp_path}/0", dtype, 0, precision=precision))
    assert not torch.equal(expected["blocks.0.up.weight"], before["blocks.0.up.weight"])
    for zero in (1, 2, 3):
        model = train(world, f"{tmp_path}/{zero}", dtype, zero, precision=precision)
        found = whole(model)
        for name, one in found.items():
            assert one.dtype == before[name].dtype, "what lies in memory keeps its format"
            if "base" in name or "norm" in name:
                assert torch.equal(one.view(torch.uint8), before[name].view(torch.uint8))
            else:
                torch.testing.assert_close(one, expected[name], rtol=1e-6, atol=1e-6)


def train_and_resume(world: World, folder: str) -> None:
    for zero in (0, 3):
        options: dict[str, Any] = {"precision": "bf16", "checkpoint": {"every_steps": 2}, "ema": {"decay": 0.5}}
        unbroken = whole(train(world, f"{folder}/{zero}", torch.bfloat16, zero, steps=4, **options))
        train(world, f"{folder}/{zero}-resumed", torch.bfloat16, zero, steps=2, **options)
        resumed = whole(train(world, f"{folder}/{zero}-resumed", torch.bfloat16, zero, steps=4, **options))
        for name, one in unbroken.items():
            assert torch.equal(resumed[name], one), name
        torch.save(unbroken, f"{folder}/{zero}.pt")


def test_runs_with_a_frozen_bf16_base_resume_bit_by_bit_and_are_exported_in_their_formats(tmp_path: Path) -> None:
    run_ranks(train_and_resume, 2, str(tmp_path))
    for zero in (0, 3):
        export_run(tmp_path / str(zero), tmp_path / f"{zero}-exported")
        exported = load_file(tmp_path / f"{zero}-exported" / "model.safetensors")
        expected = torch.load(tmp_path / f"{zero}.pt")
        assert exported.keys() == expected.keys()
        assert {name: one.dtype for name, one in exported.items()} == {n: one.dtype for n, one in expected.items()}
        assert all(torch.equal(exported[name], one) for name, one in expected.items())


class Unfreezing(Callbacks):
    def __init__(self) -> None:
        self.model: nn.Module | None = None

    def on_step(self, record: StepRecord) -> None:
        assert self.model is not None
        if record.step == 2:
            self.model.requires_grad_(True)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rounded_parameter_that_is_unfrozen_is_refused_by_name_before_it_changes(
    world: World, tmp_path: Path, zero: int
) -> None:
    observer, model = Unfreezing(), Lora(torch.bfloat16)
    observer.model = model
    with (
        make_trainer(
            world,
            str(tmp_path),
            model=model,
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1),
            observers=[observer],
            parallel={"zero": zero},
        ) as trainer,
        pytest.raises(TrainerConfigError, match=r"'blocks\.0\.base\.weight' is torch\.bfloat16 and trained"),
    ):
        trainer.train()
