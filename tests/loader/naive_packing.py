"""Packing one document and one token at a time, written for reading: what the fast path must equal."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """One sequence: (document, first token of it, tokens) in order of the documents."""

    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(length for _, _, length in self.pieces)


def sequences(
    documents: list[list[int]], *, seq_len: int, method: str, long_documents: str, eos: int | None
) -> list[tuple[int, ...]]:
    """The tokens of each sequence of some documents, without padding."""
    ended = [[*one, eos] if eos is not None and one and one[-1] != eos else one for one in documents]
    pieces = cut([len(one) for one in ended], seq_len, long_documents, method)
    rows = (best_fit if method == "best_fit" else concat)(pieces, seq_len)
    return [tuple(t for i, start, length in row.pieces for t in ended[i][start : start + length]) for row in rows]


def cut(lengths: list[int], seq_len: int, policy: str, method: str) -> list[tuple[int, int, int]]:
    """The pieces of all documents, before any sequence is made."""
    pieces = []
    for document, length in enumerate(lengths):
        if policy == "drop" and length > seq_len:
            continue
        stop = min(length, seq_len) if policy == "truncate" else length
        if method == "concat":
            pieces += [(document, 0, stop)] if stop else []
            continue
        pieces += [(document, start, min(seq_len, stop - start)) for start in range(0, stop, seq_len)]
    return pieces


def best_fit(pieces: list[tuple[int, int, int]], seq_len: int) -> list[Row]:
    """Longest piece first, each into the row with the least room that is enough; of equals that filled last."""
    rows: list[Row] = []
    filled: list[Row] = []  # the one that got a piece last stands last
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        fitting = [row for row in filled if row.tokens + piece[2] <= seq_len]
        if fitting:
            row = max(reversed(fitting), key=lambda row: row.tokens)  # max takes the first of equals
            filled.remove(row)
        else:
            row = Row()
            rows.append(row)
        row.pieces.append(piece)
        filled.append(row)
    rows.sort(key=lambda row: row.pieces[0])  # by the longest of each
    for row in rows:
        row.pieces.sort()
    return rows


def concat(pieces: list[tuple[int, int, int]], seq_len: int) -> list[Row]:
    """Pieces end to end, one token after the other into the row that is not yet full."""
    rows: list[Row] = []
    for document, start, length in pieces:
        for token in range(start, start + length):
            if not rows or rows[-1].tokens == seq_len:
                rows.append(Row())
            last = rows[-1].pieces[-1] if rows[-1].pieces else None
            if last is not None and last[0] == document and token > start:
                rows[-1].pieces[-1] = (document, last[1], last[2] + 1)
            else:
                rows[-1].pieces.append((document, token, 1))
    return rows


def fill(
    rows: list[Row], documents: list[list[int]], masks: list[list[bool]] | None, seq_len: int, pad: int
) -> list[dict[str, list[int]]]:
    """Each row's tokens, position_ids, document_ids and loss_mask."""
    filled = []
    for row in rows:
        out: dict[str, list[int]] = {"tokens": [], "position_ids": [], "document_ids": [], "loss_mask": []}
        for number, (document, start, length) in enumerate(row.pieces):
            for i in range(length):
                out["tokens"].append(documents[document][start + i])
                out["position_ids"].append(i)
                out["document_ids"].append(number)
                counts = masks is None or masks[document][start + i]
                out["loss_mask"].append(i > 0 and counts)
        for i in range(seq_len - row.tokens):
            out["tokens"].append(pad)
            out["position_ids"].append(i)
            out["document_ids"].append(-1)
            out["loss_mask"].append(False)
        filled.append(out)
    return filled
