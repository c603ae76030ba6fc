"""The processes of a context-parallel group get their parts of the same sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_mesh import mesh_of

from penstock import DistributedDataLoader, Mixture, Packing, SequenceCut, TokensFormat
from penstock.loader import ConfigError

LENGTH = 16
FORMAT = TokensFormat(seq_len=LENGTH)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """41 sequences of 16 different tokens."""
    np.arange(41 * LENGTH, dtype=np.uint16).tofile(tmp_path / "a.bin")
    return str(tmp_path)


def make(source: Any, part: int, parts: int, **options: Any) -> DistributedDataLoader[Any]:
    mesh = mesh_of(("dp", "cp"), (2, parts), (1, part))
    given = {"batch_size": 4, "format": FORMAT, "mesh": mesh, "sequence_cut": SequenceCut(["tokens"])} | options
    return DistributedDataLoader(source, **given)


def add_labels(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"labels": np.stack([sample["tokens"] + 1] * 2, axis=1), "length": len(sample["tokens"])}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("transform", [None, add_labels])
def test_head_tail_parts_are_naive_slices_of_the_whole(tokens, parts, transform):
    fields = ["tokens"] if transform is None else ["tokens", "labels"]
    with DistributedDataLoader(
        tokens, batch_size=4, format=FORMAT, rank=1, world_size=2, last_batch="partial", transform=transform
    ) as plain:
        whole = list(plain)
    size = LENGTH // (2 * parts)
    for part in range(parts):
        head, tail = part * size, (2 * parts - 1 - part) * size
        cut = SequenceCut(fields)
        with make(tokens, part, parts, transform=transform, sequence_cut=cut, last_batch="partial") as loader:
            batches = list(loader)
        assert len(batches) == len(whole)
        for batch, uncut in zip(batches, whole, strict=True):
            for name in fields:
                both = [uncut[name][:, head : head + size], uncut[name][:, tail : tail + size]]
                assert torch.equal(batch[name], torch.cat(both, dim=1))
            places = [*range(head, head + size), *range(tail, tail + size)]
            assert batch["__positions__"].tolist() == [places] * len(uncut["tokens"])
            assert transform is None or torch.equal(batch["length"], uncut["length"])


@given(pieces=st.integers(1, 40), parts=st.integers(1, 9), order=st.sampled_from(["head_tail", "contiguous"]))
def test_the_parts_together_are_the_whole_and_head_tail_parts_cost_the_same(pieces, parts, order):
    length = 2 * parts * pieces
    found = [SequenceCut(["x"], order).positions(length, part, parts) for part in range(parts)]
    assert sorted(torch.cat(found).tolist()) == list(range(length))
    assert {one.dtype for one in found} == {torch.int64}
    assert {len(one) for one in found} == {length // parts}
    if order == "contiguous":
        assert torch.cat(found).tolist() == list(range(length))
    else:  # a token's causal attention costs its position
        assert len({int(one.sum()) for one in found}) == 1


@pytest.mark.parametrize("parts", [2, 4])
def test_head_tail_is_the_order_of_torch(parts):
    module = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = module._HeadTailLoadBalancer(64, parts, "cpu")._generate_indices()[0]
    ours = torch.cat([SequenceCut(["x"]).positions(64, part, parts) for part in range(parts)])
    assert torch.equal(ours, order.to(torch.int64))


def test_a_cut_comes_after_collate_and_before_the_batch_is_seen_by_peek(tokens):
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([sample["tokens"] for sample in map(to_tensors, samples)])}

    with make(tokens, 1, 2, collate=collate, sequence_cut=SequenceCut(["x"], "contiguous")) as loader:
        assert loader.peek()["x"].shape == (4, 8)
        assert all(batch["__positions__"][0].tolist() == list(range(8, 16)) for batch in loader)
    with make(tokens, 1, 2, collate=list) as loader, pytest.raises(ConfigError, match="batches are list"):
        next(iter(loader))


def to_tensors(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in sample.items()}


def test_stages_without_a_cut_field_get_their_batches_whole(tokens):
    mesh = mesh_of(("pp", "dp", "cp"), (2, 1, 2), (1, 0, 0))
    with make(tokens, 0, 2, mesh=mesh, fields_by_stage={"tokens": "first"}, with_ids=True) as loader:
        assert {frozenset(batch) for batch in loader} == {frozenset({"__id__"})}


def shorten(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": sample["tokens"][:-2]}


def lengthen_one(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": sample["tokens"], "labels": np.zeros(8)}


def vary(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": sample["tokens"][: 8 + sample["tokens"][0] % 5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": shorten}, "a length of 14 does not allow: make it a multiple of 8, such as 16"),
        ({"transform": vary}, "'tokens' is a list.*pad or pack"),
        ({"transform": lambda sample: {"tokens": 1}}, r"shape \(4,\), without a dimension 1"),
        ({"transform": lambda sample: {"x": sample["tokens"]}}, r"names 'tokens', but batches have \['x'\]"),
        (
            {"transform": lengthen_one, "sequence_cut": SequenceCut(["tokens", "labels"])},
            r"different lengths: {'tokens': 16, 'labels': 8}",
        ),
    ],
)
def test_sequences_that_have_no_equal_parts_are_refused_by_name(tokens, options, message):
    with make(tokens, 0, 4, **options) as loader, pytest.raises(ConfigError, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_cut": "head_tail"}, "must be a SequenceCut"),
        ({"sequence_cut": SequenceCut(["labels"])}, r"names \['labels'\], which are not among the fields \['tokens'\]"),
        ({"sequence_cut": SequenceCut(["tokens"], mesh_dim="sp")}, "none is 'sp'"),
        ({"sequence_cut": SequenceCut(["tokens"], mesh_dim="dp")}, "'dp', along which samples differ"),
        ({"mesh": None}, "without a mesh.*cp or context"),
        ({"mesh": mesh_of(("dp", "tp"), (2, 2), (0, 0))}, "none is cp or context"),
        ({"mesh": mesh_of(("dp", "cp"), (2, 2), None)}, "not in it"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused_by_the_constructor(tokens, options, message):
    with pytest.raises(ConfigError, match=message):
        make(tokens, 0, 2, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokens",), r"fields='tokens'\): give a list"),
        (([],), "give a list"),
        ((["tokens"], "zigzag"), "must be 'head_tail' or 'contiguous'"),
    ],
)
def test_a_cut_without_fields_or_of_unknown_order_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SequenceCut(*arguments)


@pytest.mark.parametrize("transform", [None, add_labels])
def test_batches_of_mixtures_are_cut_too(tokens, transform):
    seen = []
    for part in range(2):
        with make(Mixture({tokens: 1.0, f"{tokens}/a.bin": 1.0}), part, 2, transform=transform) as loader:
            batch = next(iter(loader))
            assert torch.equal(batch["tokens"] % LENGTH, batch["__positions__"])
            seen.append(batch["tokens"] // LENGTH)
    assert torch.equal(*seen)


def label(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Packed sequences with their labels: -100 where nothing is predicted."""
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("tokens", "position_ids")}
    predicted = torch.from_numpy(np.stack([row["loss_mask"] for row in rows]))
    labels = batch["tokens"].roll(-1, dims=1).masked_fill(~predicted.roll(-1, dims=1), -100)
    labels[:, -1] = -100
    return batch | {"labels": labels}


def test_packed_sequences_are_cut_with_the_labels_that_collate_makes(tokens):
    packing, mesh = Packing(seq_len=32, method="concat"), mesh_of(("dp", "cp"), (1, 2), (0, 1))
    with DistributedDataLoader(
        tokens, batch_size=4, format=FORMAT, packing=packing, collate=label, rank=0, world_size=1
    ) as plain:
        whole = next(iter(plain))
    cut = SequenceCut(["tokens", "labels", "position_ids"])
    with make(tokens, 1, 2, mesh=mesh, packing=packing, collate=label, sequence_cut=cut) as loader:
        batch = next(iter(loader))
    for name in cut.fields:
        assert torch.equal(batch[name], whole[name].gather(1, batch["__positions__"]))
    with pytest.raises(ConfigError, match="labels must be shifted before"):
        make(tokens, 1, 2, mesh=mesh, packing=packing)
    with pytest.raises(ConfigError, match="all stages pack the same documents"):
        make(tokens, 1, 2, mesh=mesh, packing=packing, sequence_cut=None, fields_by_stage={"tokens": 0})
