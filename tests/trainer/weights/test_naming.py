"""Which tensor of a source goes where: renaming, ties, and one error for all that differs."""

from __future__ import annotations

import pytest
import torch

from penstock.trainer import CheckpointMismatchError, TrainerConfigError, WarmStartConfig
from penstock.trainer.weights.names import Allowed, TensorFacts, assign, rename_all


def facts(shape: tuple[int, ...] = (2,), dtype: torch.dtype | None = torch.float32) -> TensorFacts:
    return TensorFacts(shape, dtype, str(dtype).removeprefix("torch."))


def test_rules_are_applied_in_turn_and_may_not_join_names() -> None:
    rules = (r"^model[.]=>", r"layers[.](\d+)=>blocks.\1.inner")
    assert rename_all(["model.layers.3.w", "head"], rules) == {
        "model.layers.3.w": "blocks.3.inner.w",
        "head": "head",
    }
    with pytest.raises(CheckpointMismatchError, match=r"give a1, a2 the name 'a'"):
        rename_all(["a1", "a2"], [r"\d=>"])
    with pytest.raises(CheckpointMismatchError, match=r"give x the name ''"):
        rename_all(["x"], ["x=>"])


@pytest.mark.parametrize("rule", ["no arrow", "=>x", "(=>x", r"a=>\1"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(TrainerConfigError, match=r"warm_start\.rename="):
        WarmStartConfig(rename=(rule,))


def test_all_that_differs_is_in_one_error() -> None:
    wanted = {"a": facts(), "b": facts(), "c": facts(), "d": facts(dtype=torch.int32), "e": facts()}
    offered = {"b": facts((3,)), "c": facts(), "d": facts(dtype=torch.int64), "e": facts(dtype=None), "x": facts()}
    with pytest.raises(CheckpointMismatchError) as caught:
        assign("there", wanted, offered)
    told = str(caught.value)
    assert "1 of the model's are missing there: a;" in told
    assert "1 of the source's are not in the model: x;" in told
    assert "3 do not fit: b ((3,) there and (2,) here), d (int64 there and int32 here), e (None there" in told


def test_differences_that_are_allowed_by_name_are_kept_and_ignored() -> None:
    allowed = Allowed(missing=("head.*",), unexpected=("old.*",), mismatched=("embed*",))
    wanted = {"head.w": facts(), "embed": facts((4,)), "body": facts()}
    found = assign("there", wanted, {"embed": facts(), "body": facts(), "old.w": facts()}, allowed=allowed)
    assert dict(found.sources) == {"body": "body"}
    assert found.kept == ("head.w", "embed")
    assert found.ignored == ("old.w",)
    with pytest.raises(CheckpointMismatchError, match=r"allow_missing='heda\.\*' fits no name of the model"):
        assign("there", wanted, {}, allowed=Allowed(missing=("heda.*",)))


def test_one_name_of_a_tied_tensor_suffices() -> None:
    ties = [frozenset({"in", "out"})]
    wanted = {"in": facts(), "out": facts()}
    assert dict(assign("there", wanted, {"out": facts()}, ties=ties).sources) == {"out": "out"}
    with pytest.raises(CheckpointMismatchError, match="missing there: in, out"):
        assign("there", wanted, {}, ties=ties)


@pytest.mark.parametrize(
    ("source", "target", "converts"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float32, True),
        (torch.uint8, torch.int64, True),
        (torch.int64, torch.int32, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.complex64, torch.float32, False),
        (torch.bool, torch.int64, False),
    ],
)
def test_only_formats_that_keep_the_meaning_are_converted(
    source: torch.dtype, target: torch.dtype, converts: bool
) -> None:
    wanted, offered = {"a": facts(dtype=target)}, {"a": facts(dtype=source)}
    if converts:
        assert assign("there", wanted, offered).sources == {"a": "a"}
    else:
        with pytest.raises(CheckpointMismatchError, match="do not fit"):
            assign("there", wanted, offered)


def test_a_prefix_that_is_all_that_differs_is_told() -> None:
    names = {f"layer.{number}": facts() for number in range(4)}
    longer = {f"model.{name}": one for name, one in names.items()}
    with pytest.raises(CheckpointMismatchError, match=r"4 names differ by the prefix 'model\.' alone.*\^model\\\.=>"):
        assign("there", names, longer)
    with pytest.raises(CheckpointMismatchError, match=r"4 names lack the prefix 'model\.' alone.*'\^=>model\."):
        assign("there", longer, names)
    renamed = assign("there", names, longer, rules=["^model\\.=>"])
    assert renamed.sources == dict(zip(names, longer, strict=True))
