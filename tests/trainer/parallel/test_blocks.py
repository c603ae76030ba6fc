"""Which modules are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import make_trainer
from torch import nn
from torch.nn.utils import parametrizations

from penstock.trainer import TrainerConfigError, World
from penstock.trainer.parallel.blocks import find_blocks


class Normed(nn.Module):
    """Has a weight norm outside of lists and one in a list's item."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(2, 2))
        self.blocks = nn.Sequential(*blocks) if not blocks else nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_what_makes_a_weight_is_no_block() -> None:
    blocks = [parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2)]
    assert find_blocks(Normed(*blocks), (), "parallel.blocks") == blocks
    assert find_blocks(Normed(), (), "parallel.blocks") == []


@pytest.mark.slow
def test_a_model_with_a_weight_norm_and_no_list_is_compiled_as_a_whole(world: World, tmp_path: Path) -> None:
    model = Normed()
    options: dict[str, Any] = {"compile": {"enabled": True, "backend": "eager"}}
    with make_trainer(world, str(tmp_path), model=model, **options):
        compiled = [name for name, one in model.named_modules() if one._compiled_call_impl is not None]
    assert compiled == [""]
    with pytest.raises(TrainerConfigError, match="the model has no ModuleList to find blocks in"):
        make_trainer(world, str(tmp_path), model=Normed(), activation={"every": 1})
