"""Documents in whatever form a sample has them, tokenised or not, and refusals that name the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.loader.columns import Ragged
from penstock.loader.decoding.row_work import RowError
from penstock.loader.errors import ConfigError
from penstock.loader.packing.config import Packing
from penstock.loader.packing.packer import Packer
from penstock.loader.packing.tokenizer import open_tokenizer

WORDS = ["<eos>", "<pad>", "a", "b", "c"]
DOCUMENTS = [[2, 3, 4], [4], [3, 3]]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def encode_words(texts: list[str]) -> list[list[int]]:
    return [[WORDS.index(word) for word in text.split()] for text in texts]


def rows_of(packing: Packing, values: Mapping[str, Any]) -> list[list[int]]:
    packed = Packer.open(packing).pack(values)
    return packed.fields["tokens"].tolist()


@pytest.mark.parametrize(
    "values",
    [
        DOCUMENTS,
        [np.array(one, np.uint16) for one in DOCUMENTS],
        [np.array(DOCUMENTS[0], np.uint8), DOCUMENTS[1], torch.tensor(DOCUMENTS[2])],
        Ragged(np.array([2, 3, 4, 4, 3, 3], np.int32), np.array([0, 3, 4, 6])),
    ],
)
def test_token_ids_come_in_many_forms(values: Any) -> None:
    assert rows_of(Packing(seq_len=4, pad=1), {"tokens": values}) == [[2, 3, 4, 4], [3, 3, 1, 1]]


def test_an_array_of_equal_documents_is_packed_row_by_row() -> None:
    values = np.arange(6).reshape(3, 2)
    assert rows_of(Packing(seq_len=4, pad=9, method="concat"), {"tokens": values}) == [[0, 1, 2, 3], [4, 5, 9, 9]]


@pytest.mark.parametrize("form", ["path", "folder", "object", "function"])
def test_texts_are_tokenised(tmp_path: Path, form: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given: Any = {
        "path": str(tmp_path / "tokenizer.json"),
        "folder": tmp_path,
        "object": tokenizer,
        "function": encode_words,
    }[form]
    packing = Packing(seq_len=4, field="text", tokenizer=given, pad=1)
    assert rows_of(packing, {"text": ["a b c", b"c", memoryview(b"b b")]}) == [[2, 3, 4, 4], [3, 3, 1, 1]]


def test_tokens_of_the_settings_are_named_by_their_text() -> None:
    packing = Packing(seq_len=4, field="text", tokenizer=make_tokenizer(), eos="<eos>", pad="<pad>")
    assert rows_of(packing, {"text": ["a b", "c <eos>"]}) == [[2, 3, 0, 1], [4, 0, 1, 1]]


def test_what_a_tokenizer_file_says_of_truncation_and_padding_does_not_cut_documents() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=3)
    packing = Packing(seq_len=4, field="text", tokenizer=tokenizer, pad=1)
    assert rows_of(packing, {"text": ["a b c c", "a"]}) == [[2, 3, 4, 4], [2, 1, 1, 1]]
    assert tokenizer.truncation["max_length"] == 2  # the user's own is as it was


def test_runs_of_documents_are_split_where_they_end_and_each_sample_counts_once() -> None:
    runs = np.array([[5, 0, 6, 7, 0, 8], [9, 0, 0, 4, 4, 4]])
    packed = Packer.open(Packing(seq_len=4, split_at=0, pad=1, method="best_fit")).pack({"tokens": runs})
    documents = [[5, 0], [6, 7, 0], [8], [9, 0], [0], [4, 4, 4]]
    found = []
    for row, ids in zip(packed.fields["tokens"], packed.fields["document_ids"], strict=True):
        found += [row[ids == i].tolist() for i in range(ids.max() + 1)]
    assert sorted(found) == sorted(documents)
    assert sorted(packed.rows.tolist()) == [0, 0, 0, 1, 1, 1]
    assert sorted(packed.rows[packed.is_first].tolist()) == [0, 1]


def test_a_mask_of_the_sample_is_packed_with_its_tokens() -> None:
    packing = Packing(seq_len=6, mask_field="mask", eos=9)
    packed = Packer.open(packing).pack({"tokens": [[1, 2, 3, 4], [5]], "mask": [[1, 0, 0, 1], [True]]})
    row = packed.fields["tokens"][0].tolist()
    assert row == [1, 2, 3, 4, 9, 0]  # eos counts as the token before it does
    assert packed.fields["loss_mask"][0].tolist() == [False, False, False, True, True, False]
    assert packed.fields["loss_mask"][1].tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("packing", "values", "row", "says"),
    [
        ({}, {"tokens": [[1], None]}, 1, "has no field 'tokens'"),
        ({}, {"tokens": [[1], "text"]}, 1, "give tokenizer="),
        ({}, {"tokens": [[1], [[1, 2]]]}, 1, "give a flat list"),
        ({}, {"tokens": [[1], [0.5]]}, 1, "float64 of shape (1,)"),
        ({}, {"tokens": np.array([[0.5]])}, 0, "holds float64"),
        ({}, {"tokens": [[1], [], [3, -100]]}, 2, "holds -100"),
        ({"mask_field": "mask"}, {"tokens": [[1], [2, 3]], "mask": [[1], [1]]}, 1, "1 values for the 2 tokens"),
        ({"mask_field": "mask"}, {"tokens": [[1], [2, 3]], "mask": [[1], [1, -100]]}, 1, "holds -100"),
        ({"mask_field": "mask"}, {"tokens": [[1]], "mask": [None]}, 0, "has no field 'mask'"),
        ({"long_documents": "error"}, {"tokens": [[1], [1] * 5]}, 1, "5 tokens, more than seq_len=4"),
        ({"long_documents": "error", "split_at": 0}, {"tokens": [[1, 0, 2], [3, 0, 1, 1, 1, 1, 1]]}, 1, "5 tokens"),
        ({"tokenizer": encode_words}, {"tokens": ["a", 5]}, 1, "is int, not text"),
        ({"tokenizer": encode_words}, {"tokens": ["a", b"\xff"]}, 1, "not UTF-8"),
        ({"tokenizer": encode_words}, {"tokens": ["a", "b x"]}, 1, "cannot be tokenised: ValueError"),
        ({"tokenizer": lambda texts: [[0.5] for _ in texts]}, {"tokens": ["a"]}, 0, "whole numbers"),
    ],
)
def test_a_bad_document_is_refused_with_its_row(
    packing: dict[str, Any], values: dict[str, Any], row: int, says: str
) -> None:
    with pytest.raises(RowError) as caught:
        Packer.open(Packing(seq_len=4, **packing)).pack(values)
    assert caught.value.row == row
    assert says in str(caught.value.cause)


@pytest.mark.parametrize(
    ("returned", "says"),
    [(lambda texts: {"input_ids": texts}, "returned dict"), (lambda texts: [[1]], "1 lists for 2")],
)
def test_a_function_that_returns_no_token_ids_is_refused(returned: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tokenizer(returned).encode(["a", "b"])


def test_a_tokenizer_that_cannot_be_loaded_is_refused_with_what_would_work(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    for given, says in (
        ("gpt2", "there is no file gpt2; .*from_pretrained"),
        (broken, "cannot be read as a tokenizer"),
        (17, "tokenizer=17: give the path"),
    ):
        with pytest.raises(ConfigError, match=says):
            Packer.open(Packing(seq_len=4, tokenizer=given))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seq_len": 1}, "seq_len=1"),
        ({"seq_len": 2.5}, "seq_len=2.5"),
        ({"seq_len": True}, "seq_len=True"),
        ({"method": "greedy"}, "'best_fit' or 'concat'"),
        ({"long_documents": "cut"}, "'split', 'truncate', 'drop' or 'error'"),
        ({"pad": -1}, "pad=-1"),
        ({"pad": None}, "pad=None"),
        ({"eos": "<eos>"}, "without a tokenizer"),
        ({"field": ""}, "field=''"),
        ({"mask_field": "tokens"}, "name another"),
        ({"mask_field": "mask", "tokenizer": encode_words}, "make both in transform="),
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"fields": ["tokens", "labels"]}, "name some of tokens, position_ids"),
        ({"fields": "labels"}, "fields='labels'"),
        ({"fields": []}, "or None for all"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Packing(**{"seq_len": 8, **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"eos": "<end>"}, "eos='<end>': the tokenizer has no such token"), ({"pad": 77}, "pad=77: .* it has 5 tokens")],
)
def test_tokens_that_the_tokenizer_does_not_have_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Packer.open(Packing(seq_len=4, tokenizer=make_tokenizer(), **settings))


def test_the_fingerprint_tells_settings_and_tokenizers_apart() -> None:
    plain = Packer.open(Packing(seq_len=8))
    other = make_tokenizer()
    other.add_special_tokens(["<new>"])
    packers = [
        plain,
        Packer.open(Packing(seq_len=8, pad=1)),
        Packer.open(Packing(seq_len=8, tokenizer=make_tokenizer())),
        Packer.open(Packing(seq_len=8, tokenizer=other)),
    ]
    assert len({packer.fingerprint for packer in packers}) == 4
    assert Packer.open(Packing(seq_len=8, tokenizer=make_tokenizer())).fingerprint == packers[2].fingerprint
    assert Packer.open(Packing(seq_len=8, fields=["tokens"])).fingerprint == plain.fingerprint == "4ddf5c76a045dea2"
