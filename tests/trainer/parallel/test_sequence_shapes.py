"""Shapes where a plan cuts sequences, and what a pipeline refuses of a plan."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.parallel.pipeline.cut import cut_model
from penstock.trainer.parallel.pipeline.staged import StagedModel
from penstock.trainer.parallel.sequence_shapes import find_shape_change
from penstock.trainer.parallel.tensor import STYLES


def test_forwards_take_and_give_parts_of_sequences_as_their_styles_do() -> None:
    given = torch.zeros(2, 6, 3)
    shapes = {}
    for name in ("embedding_to_sequence", "rowwise", "colwise", "colwise_of_sequence", "loss_of_sequence", "sequence"):
        shapes[name] = tuple(find_shape_change("x", STYLES[name](), 2)(lambda x: x)(given).shape)
    assert shapes == {
        "embedding_to_sequence": (2, 3, 3),
        "rowwise": (2, 6, 3),
        "colwise": (2, 6, 3),
        "colwise_of_sequence": (2, 12, 3),
        "loss_of_sequence": (2, 12, 3),
        "sequence": (2, 6, 3),
    }
    style = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    found = find_shape_change("x", style, 2)(lambda x, mask: (x.shape[1], mask.shape[1]))(given, given)
    assert found == (12, 6)


def test_what_has_no_equal_parts_or_unknown_shapes_is_refused() -> None:
    change = find_shape_change("words", STYLES["embedding_to_sequence"](), 4)
    with pytest.raises(TrainerConfigError, match="one of 6 tokens has no 4 equal parts; make them 8 long"):
        change(lambda x: x)(torch.zeros(2, 6, 3))
    style = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    with pytest.raises(TrainerConfigError, match="'words' out by PrepareModuleOutput, of which a pipeline cannot tell"):
        find_shape_change("words", style, 4)


def test_modules_around_stages_are_refused() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers[:2]), layers[2])
    staged = StagedModel(model, cut_model(model, ["0.1"], 2), torch.device("cpu"))
    with pytest.raises(TrainerConfigError, match=r"parallel.plan names '0', which lies on several stages"):
        staged.change_shapes({"0": find_shape_change("0", STYLES["sequence"](), 2)})
    staged.change_shapes({"0.0": find_shape_change("0.0", STYLES["rowwise"](), 2)})
