"""Packing through the public face: documents of every format, texts, masks, what batches hold, and refusals."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DistributedDataLoader, Packing, TokenDocumentsFormat, TokensFormat
from penstock.loader import ConfigError, DecodeError, Keep, PartitionError, StateMismatchError

DOCUMENTS = [[10 * i + j for j in range(1 + i * 7 % 9)] for i in range(1, 60)]
TOTAL = sum(map(len, DOCUMENTS))


def encode(texts: list[str]) -> list[list[int]]:
    return [[int(word) for word in text.split()] for text in texts]


def to_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": encode([sample["txt"]])[0]}


def write_parquet(folder: Path, columns: dict[str, Any] | None = None) -> str:
    table = pa.table(columns or {"tokens": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "a.parquet", row_group_size=16)
    return str(folder)


def write_text_tar(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, document in enumerate(DOCUMENTS):
            data = " ".join(map(str, document)).encode()
            info = tarfile.TarInfo(f"{i:03d}.txt")
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def write_json_tar(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i, document in enumerate(DOCUMENTS):
            data = json.dumps(document).encode()
            info = tarfile.TarInfo(f"{i:03d}.json")
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def write_jsonl(folder: Path) -> None:
    lines = [json.dumps({"text": " ".join(map(str, document)), "tokens": document}) for document in DOCUMENTS]
    (folder / "a.jsonl").write_text("\n".join(lines))


def write_arrow(folder: Path) -> None:
    table = pa.table({"tokens": pa.array(DOCUMENTS, pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


def write_tokens(folder: Path) -> None:
    tokens = [token for document in DOCUMENTS for token in [*document, 0]]
    tokens += [0] * (-len(tokens) % 16)
    np.array(tokens, "<u2").tofile(folder / "a.bin")


def tokens_of(batches: list[dict[str, Any]]) -> list[int]:
    return sorted(token for batch in batches for token in batch["tokens"][batch["document_ids"] >= 0].tolist())


CASES: dict[str, tuple[Callable[[Path], Any], Packing, dict[str, Any]]] = {
    "parquet": (write_parquet, Packing(seq_len=32), {}),
    "arrow": (write_arrow, Packing(seq_len=32), {}),
    "jsonl": (write_jsonl, Packing(seq_len=32), {}),
    "jsonl text": (write_jsonl, Packing(seq_len=32, field="text", tokenizer=encode), {}),
    "tar text": (write_text_tar, Packing(seq_len=32, field="txt", tokenizer=encode), {}),
    "tar text, not decoded": (write_text_tar, Packing(seq_len=32, field="txt", tokenizer=encode), {"decode": None}),
    "tar json": (write_json_tar, Packing(seq_len=32, field="json"), {}),
    "transform": (
        write_text_tar,
        Packing(seq_len=32),
        {"transform": to_tokens},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_of_every_format_is_in_one_place(tmp_path: Path, case: str) -> None:
    write, packing, options = CASES[case]
    write(tmp_path)
    with DistributedDataLoader(str(tmp_path), batch_size=2, packing=packing, last_batch="partial", **options) as loader:
        batches = list(loader)
        assert tokens_of(batches) == sorted(token for one in DOCUMENTS for token in one)
        metrics = loader.metrics()
    assert (metrics.packed_documents, metrics.packed_tokens) == (len(DOCUMENTS), TOTAL)
    assert metrics.packed_sequences == sum(len(batch["tokens"]) for batch in batches)
    assert metrics.padding_tokens == 32 * metrics.packed_sequences - TOTAL
    assert metrics.packing_efficiency == TOTAL / (TOTAL + metrics.padding_tokens)


def test_documents_of_token_files_end_where_their_last_token_is(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    fmt = TokenDocumentsFormat(eos=0)
    with DistributedDataLoader(str(tmp_path), batch_size=1, packing=Packing(seq_len=32, pad=1), format=fmt) as loader:
        metrics = run(loader)
    assert metrics.packed_documents >= len(DOCUMENTS)
    assert metrics.cut_documents == 0
    runs = TokensFormat(seq_len=16)
    packing = Packing(seq_len=32, pad=1, split_at=0)
    with DistributedDataLoader(str(tmp_path), batch_size=1, packing=packing, format=runs) as loader:
        cut = run(loader)
    assert cut.packed_tokens == metrics.packed_tokens
    assert cut.packed_documents > metrics.packed_documents  # those on the border of two runs are two


def run(loader: DistributedDataLoader[Any]) -> Any:
    for _ in loader:
        pass
    return loader.metrics()


def test_a_batch_has_what_attention_over_documents_needs(tmp_path: Path) -> None:
    source = write_parquet(tmp_path)
    packing = Packing(seq_len=32, pad=7)
    with DistributedDataLoader(source, batch_size=3, packing=packing, with_ids=True, last_batch="pad") as loader:
        for batch in loader:
            check_batch(batch)
            last = batch
    assert last["__valid__"].dtype == torch.bool


def check_batch(batch: dict[str, Any]) -> None:
    tokens, positions, documents = batch["tokens"], batch["position_ids"], batch["document_ids"]
    assert (tokens.dtype, positions.dtype, documents.dtype) == (torch.int64, torch.int64, torch.int32)
    bounds = [*torch.nonzero(positions.reshape(-1) == 0).reshape(-1).tolist(), positions.numel()]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == bounds
    assert batch["max_seqlen"] == max(high - low for low, high in pairwise(bounds))
    assert (tokens[documents < 0] == 7).all()
    assert torch.equal(batch["loss_mask"], (documents >= 0) & (positions > 0))
    for row in range(3):
        for number, sample in enumerate(i for i in batch["__id__"][row].tolist() if i >= 0):
            inside = documents[row] == number
            assert tokens[row][inside].tolist() == DOCUMENTS[sample]


def test_collate_gets_sequences_one_by_one(tmp_path: Path) -> None:
    def collate(samples: list[dict[str, Any]]) -> Any:
        return [(len(sample["tokens"]), sample["__id__"].tolist()) for sample in samples]

    options: dict[str, Any] = {"packing": Packing(seq_len=32), "collate": collate, "with_ids": True}
    with DistributedDataLoader(write_parquet(tmp_path), batch_size=2, last_batch="partial", **options) as loader:
        rows = [row for batch in loader for row in batch]
    assert {length for length, _ in rows} == {32}
    assert sorted(i for _, ids in rows for i in ids) == list(range(len(DOCUMENTS)))


@pytest.mark.parametrize(
    "fields", [["tokens"], ["loss_mask", "max_seqlen"], ["cu_seqlens"], ["document_ids", "position_ids"]]
)
def test_a_batch_has_the_fields_that_are_wanted(tmp_path: Path, fields: list[str]) -> None:
    source = write_parquet(tmp_path)
    options: dict[str, Any] = {"batch_size": 3, "with_ids": True}
    with (
        DistributedDataLoader(source, **options, packing=Packing(seq_len=32)) as all_of_them,
        DistributedDataLoader(source, **options, packing=Packing(seq_len=32, fields=fields)) as some,
    ):
        for whole, batch in zip(all_of_them, some, strict=True):
            assert set(batch) == {*fields, "__id__"}
            assert all(torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(whole[name])) for name in batch)
        assert some.state_dict() == all_of_them.state_dict()


def test_what_collate_raises_comes_with_its_own_batch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 1, "packing": Packing(seq_len=32), "with_ids": True}
    source = write_parquet(tmp_path)
    with DistributedDataLoader(source, **options) as loader:
        expected = [batch["__id__"][0].tolist() for batch in loader]

    def collate(samples: list[dict[str, Any]]) -> Any:
        ids = samples[0]["__id__"].tolist()
        if ids == expected[5]:
            raise ValueError("the sixth")
        return ids

    with DistributedDataLoader(source, **options, collate=collate) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(5)] == expected[:5]
        with pytest.raises(ValueError, match="the sixth"):
            next(batches)


def test_a_mask_of_each_sample_is_packed_with_it(tmp_path: Path) -> None:
    masks = [[token % 2 == 0 for token in document] for document in DOCUMENTS]
    source = write_parquet(tmp_path, {"tokens": DOCUMENTS, "assistant": masks})
    packing = Packing(seq_len=32, mask_field="assistant")
    with DistributedDataLoader(source, batch_size=2, packing=packing) as loader:
        for batch in loader:
            expected = (batch["document_ids"] >= 0) & (batch["position_ids"] > 0) & (batch["tokens"] % 2 == 0)
            assert torch.equal(batch["loss_mask"], expected)


def test_samples_that_transform_and_keep_drop_are_not_packed(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, {"tokens": DOCUMENTS, "n": list(range(len(DOCUMENTS)))})
    options: dict[str, Any] = {
        "keep": Keep(["n"], lambda columns: columns["n"] % 2 == 0),
        "transform": lambda sample: sample if int(sample["n"]) % 4 else None,
        "may_drop": True,
        "packing": Packing(seq_len=32),
        "last_batch": "partial",
    }
    with DistributedDataLoader(source, batch_size=2, **options) as loader:
        got = tokens_of(list(loader))
    assert got == sorted(token for i, one in enumerate(DOCUMENTS) if i % 4 == 2 for token in one)


def test_peek_shows_a_packed_batch_and_consumes_none(tmp_path: Path) -> None:
    with DistributedDataLoader(write_parquet(tmp_path), batch_size=2, packing=Packing(seq_len=32)) as loader:
        peeked = loader.peek()
        assert torch.equal(peeked["tokens"], next(iter(loader))["tokens"])
        assert len(loader.dataset) == len(DOCUMENTS)
        with pytest.raises(TypeError, match="packs samples has no number of batches"):
            len(loader)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "null": ({}, {"tokens": [[1], None, [2]]}, "sample 1 .*: has no field 'tokens'"),
    "mask": (
        {"mask_field": "m"},
        {"tokens": [[1], [2, 3]], "m": [[1], [1]]},
        "sample 1 .*: mask 'm' has 1 values",
    ),
    "long": ({"long_documents": "error"}, {"tokens": [[1], [2], [3] * 9]}, "sample 2 .* 9 tokens, more than seq_len=8"),
    "text": ({}, {"tokens": ["a", "b"]}, "sample 0 .*: field 'tokens' is str.* give tokenizer="),
    "tokenizer": ({"tokenizer": encode}, {"tokens": ["1 2", "1 x"]}, "sample 1 .* cannot be tokenised: ValueError"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_document_that_cannot_be_packed_is_named(tmp_path: Path, case: str) -> None:
    settings, columns, says = BAD[case]
    options: dict[str, Any] = {"batch_size": 1, "shuffle": False, "packing": Packing(seq_len=8, **settings)}
    with (
        DistributedDataLoader(write_parquet(tmp_path, columns), **options) as loader,
        pytest.raises(DecodeError, match=says),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("packing", "made"), [(Packing(seq_len=512), 1), (Packing(seq_len=2, long_documents="drop"), 10)]
)
def test_fewer_sequences_than_a_batch_are_refused(tmp_path: Path, packing: Packing, made: int) -> None:
    source = write_parquet(tmp_path, {"tokens": DOCUMENTS})
    with (
        DistributedDataLoader(source, batch_size=16, packing=packing, lanes=1) as loader,
        pytest.raises(PartitionError, match=f"packing= made {made} sequences of the 59 samples"),
    ):
        next(iter(loader))


def test_few_long_documents_fill_batches_of_more_sequences_than_there_are_documents(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, {"tokens": [list(range(100)), list(range(60))]})
    with DistributedDataLoader(source, batch_size=5, packing=Packing(seq_len=16)) as loader:
        assert [len(batch["tokens"]) for batch in loader] == [5, 5]
        loader.set_batch_size(10)
        assert [len(batch["tokens"]) for batch in loader] == [10]


def test_a_field_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    source = write_parquet(tmp_path)
    with pytest.raises(ConfigError, match=r"packing=Packing\(field=...\): \['text'\] is not among .*tokens"):
        DistributedDataLoader(source, batch_size=1, packing=Packing(seq_len=8, field="text", tokenizer=encode))
    wrong: Any = {"seq_len": 8}
    with pytest.raises(ConfigError, match=r"give a Packing, such as"):
        DistributedDataLoader(source, batch_size=1, packing=wrong)


def test_a_state_in_mid_epoch_is_continued_by_the_same_packing_alone(tmp_path: Path) -> None:
    source = write_parquet(tmp_path)

    def loader(**options: Any) -> DistributedDataLoader[Any]:
        return DistributedDataLoader(source, batch_size=2, **options)

    with loader(packing=Packing(seq_len=32)) as packed:
        next(iter(packed))
        state = packed.state_dict()
    with (
        loader(packing=Packing(seq_len=32, pad=1)) as other,
        pytest.raises(StateMismatchError, match="otherwise"),
    ):
        other.load_state_dict(state)
    with loader() as plain, pytest.raises(StateMismatchError, match="packing="):
        plain.load_state_dict(state)
    with loader(keep=lambda sample: True) as sifted, pytest.raises(StateMismatchError, match="that packs documents"):
        sifted.load_state_dict(state)
    del state["checksum"]
    damaged = {**state, "stream": {**state["stream"], "offsets": [1] * state["lanes"]}}
    with loader(packing=Packing(seq_len=32)) as same, pytest.raises(StateMismatchError, match="damaged loader state"):
        same.load_state_dict(damaged)


@pytest.mark.slow
def test_workers_in_processes_make_the_same_batches(tmp_path: Path) -> None:
    write_text_tar(tmp_path)
    found = []
    for processes in (0, 1):
        options: dict[str, Any] = {"packing": Packing(seq_len=32), "transform": to_tokens, "processes": processes}
        with DistributedDataLoader(str(tmp_path), batch_size=2, **options) as loader:
            found.append([batch["tokens"].tolist() for batch in loader])
    assert found[0] == found[1]


def test_settings_may_be_numpys_integers_and_states_know_them_as_the_same(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path)
    four = np.int64(4)
    with DistributedDataLoader(folder, batch_size=2, packing=Packing(seq_len=4, eos=4, buffer_size=4)) as loader:
        next(iter(loader))
        state = json.dumps(loader.state_dict())
        following = next(iter_again(loader, state))
    other = Packing(seq_len=four, eos=four, buffer_size=four, pad=np.uint8(0))
    with DistributedDataLoader(folder, batch_size=2, packing=other) as loader:
        assert next(iter_again(loader, state))["tokens"].tolist() == following["tokens"].tolist()


def iter_again(loader: DistributedDataLoader[Any], state: str) -> Any:
    loader.load_state_dict(json.loads(state))
    return iter(loader)
