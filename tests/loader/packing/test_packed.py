"""Packing equals a naive reference, loses no token, and gives what attention over documents needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_packing import best_fit, concat, cut
from naive_packing import fill as fill_naively
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from penstock.loader.columns import Ragged
from penstock.loader.packing.config import Packing, PackingMethod
from penstock.loader.packing.packed import Documents, Packed, cumulative_lengths, fill, join_segments, pack_documents

METHODS: tuple[PackingMethod, ...] = ("best_fit", "concat")


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]] | None, Packing]:
    seq_len = draw(st.integers(2, 24))
    lengths = draw(st.lists(st.one_of(st.integers(0, 2 * seq_len), st.sampled_from([1, 2, seq_len])), max_size=40))
    tokens = iter(range(10, 10**6))  # all different, so that a token tells its document and place
    documents = [[next(tokens) for _ in range(length)] for length in lengths]
    masks = None
    if draw(st.booleans()):
        masks = [[draw(st.booleans()) for _ in document] for document in documents]
    packing = Packing(
        seq_len=seq_len,
        method=draw(st.sampled_from(METHODS)),
        long_documents=draw(st.sampled_from(["split", "truncate", "drop"])),
        pad=draw(st.integers(0, 3)),
        eos=draw(st.sampled_from([None, 5, 70_000])),
    )
    return documents, masks, packing


def pack(documents: list[list[int]], masks: list[list[bool]] | None, packing: Packing) -> Packed:
    return pack_documents(
        join(documents, masks),
        packing,
    )


def join(documents: Sequence[Sequence[int]], masks: list[list[bool]] | None = None) -> Documents:
    tokens = Ragged.join([np.array(document, np.uint16) for document in documents])
    mask = None if masks is None else np.array([value for one in masks for value in one], np.bool_)
    return Documents(tokens.values, tokens.offsets, mask)


def with_eos(documents: list[list[int]], eos: int | None) -> list[list[int]]:
    return [[*one, eos] if eos is not None and one and one[-1] != eos else one for one in documents]


@given(cases())
def test_packing_equals_the_naive_reference(case: tuple[list[list[int]], list[list[bool]] | None, Packing]) -> None:
    documents, masks, packing = case
    packed = pack(documents, masks, packing)
    ended = with_eos(documents, packing.eos)
    if masks is not None:
        masks = [[*mask, *mask[-1:]][: len(one)] for mask, one in zip(masks, ended, strict=True)]
    pieces = cut([len(one) for one in ended], packing.seq_len, packing.long_documents, packing.method)
    rows = (best_fit if packing.method == "best_fit" else concat)(pieces, packing.seq_len)
    expected = fill_naively(rows, ended, masks, packing.seq_len, packing.pad)
    assert len(packed) == len(rows)
    for name, values in packed.fields.items():
        assert values.tolist() == [row[name] for row in expected], name
    owners = [document for row in rows for document, _, _ in row.pieces]
    assert packed.rows.tolist() == owners
    assert packed.is_first.tolist() == [document not in owners[:i] for i, document in enumerate(owners)]
    assert np.diff(packed.layout.bounds).tolist() == [len(row.pieces) for row in rows]


@given(cases())
def test_every_token_is_packed_once_or_counted_as_left_out(
    case: tuple[list[list[int]], list[list[bool]] | None, Packing],
) -> None:
    documents, masks, packing = case
    packed = pack(documents, masks, packing)
    counts = packed.count()
    ended = with_eos(documents, packing.eos)
    given_tokens = sorted(token for one in ended for token in one)
    is_token = packed.fields["document_ids"] >= 0
    got = sorted(packed.fields["tokens"][is_token].tolist())
    assert counts.tokens == len(got)
    assert counts.tokens + counts.truncated_tokens + counts.dropped_tokens == len(given_tokens)
    assert counts.documents + counts.dropped_documents == len(documents)
    if packing.long_documents == "split":
        assert got == given_tokens
    by_sequence = [packed.count(np.array([i])) for i in range(len(packed))]
    assert sum(one.tokens for one in by_sequence) == counts.tokens
    assert sum(one.documents for one in by_sequence) == counts.documents
    # Each document is delivered by exactly one first piece, or is left out.
    delivered = packed.rows[packed.is_first].tolist() + packed.left_out.tolist()
    assert sorted(delivered) == list(range(len(documents)))
    if packing.method == "best_fit":
        fitting = [i for i, one in enumerate(ended) if 0 < len(one) <= packing.seq_len]
        assert all(packed.rows.tolist().count(i) == 1 for i in fitting)


@given(cases(), st.data())
def test_any_sequences_are_filled_as_all_are(
    case: tuple[list[list[int]], list[list[bool]] | None, Packing], data: st.DataObject
) -> None:
    packed = pack(*case)
    which = data.draw(st.lists(st.integers(0, len(packed) - 1), max_size=6) if len(packed) else st.just([]))
    some = fill([packed] * len(which), which, packed.seq_len)
    for name, values in packed.fields.items():
        assert some[name].tolist() == values[which].tolist() if which else some[name].shape == (0, case[2].seq_len)


def test_a_batch_has_sequences_of_narrow_and_of_wide_tokens() -> None:
    tokens = [np.array([1, 2, 3], np.uint16), np.array([70_000, 5], np.int32), np.array([1 << 40], np.int64)]
    packing = Packing(seq_len=4, pad=9)
    packs = [pack_documents(Documents(one, np.array([0, len(one)])), packing) for one in tokens]
    filled = fill(packs, [0] * 3, 4)["tokens"]
    assert filled.dtype == np.int64
    assert filled.tolist() == [[1, 2, 3, 9], [70_000, 5, 9, 9], [1 << 40, 9, 9, 9]]


def log_normal(count: int, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(500), 1.0, count)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Documents(rng.integers(1, 30_000, int(offsets[-1])).astype(np.uint16), offsets)


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_pads_less_than_a_two_hundredth_of_log_normal_documents(seed: int) -> None:
    counts = pack_documents(log_normal(4096, seed), Packing(seq_len=2048)).count()
    assert counts.tokens / (2048 * counts.sequences) >= 0.995


def test_sequences_are_not_ordered_by_the_length_of_their_documents() -> None:
    packed = pack_documents(log_normal(4096), Packing(seq_len=2048))
    pieces = np.diff(packed.layout.bounds)
    first, second = np.array_split(pieces, 2)
    assert abs(first.mean() - second.mean()) < 0.1 * pieces.mean()


def attend_each(documents: list[torch.Tensor], attend: Any) -> torch.Tensor:
    return torch.cat([attend(one) for one in documents])


@pytest.mark.slow
def test_document_ids_make_flex_attention_attend_each_document_alone() -> None:
    documents = join([range(1, n + 1) for n in (7, 40, 64, 3, 21, 90)])
    packed = pack_documents(documents, Packing(seq_len=128))
    document_ids = torch.from_numpy(packed.fields["document_ids"])
    rows, length = document_ids.shape

    def same_document(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    torch.manual_seed(0)
    values = torch.randn(rows, 1, length, 16)
    mask = create_block_mask(same_document, rows, None, length, length, device="cpu")
    with pytest.warns(UserWarning, match="without torch.compile"):
        attended = flex_attention(values, values, values, block_mask=mask)
    assert isinstance(attended, torch.Tensor)
    assert not attended.isnan().any()
    check_each_alone(values, attended, packed)


def test_cu_seqlens_cut_a_batch_into_its_documents() -> None:
    documents = join([range(1, n + 1) for n in (7, 40, 64, 3, 21, 90)])
    packed = pack_documents(documents, Packing(seq_len=128))
    bounds, longest = cumulative_lengths(join_segments([packed] * len(packed), range(len(packed))))
    assert bounds.dtype == np.int32
    assert bounds[-1] == packed.fields["tokens"].size
    assert longest == np.diff(bounds).max()
    torch.manual_seed(0)
    values = torch.randn(len(packed), 1, 128, 16)
    flat = values.transpose(1, 2).reshape(-1, 16)  # what variable-length attention gets: (B * S, ...)
    attended = torch.cat(
        [
            F.scaled_dot_product_attention(*[flat[low:high][None]] * 3, is_causal=True)[0]
            for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
    )
    check_each_alone(values, attended.reshape(len(packed), 128, 1, 16).transpose(1, 2), packed)


def check_each_alone(values: torch.Tensor, attended: torch.Tensor, packed: Packed) -> None:
    """Whether ``attended`` (rows, 1, length, width) is what attention gives each document by itself."""
    checked = 0
    for row, ids in enumerate(packed.fields["document_ids"]):
        for document in range(ids.max() + 1):
            where = torch.from_numpy(np.flatnonzero(ids == document))
            alone = values[row : row + 1, :, where]
            expected = F.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
            torch.testing.assert_close(attended[row : row + 1, :, where], expected)
            checked += len(where)
    assert checked == packed.count().tokens
