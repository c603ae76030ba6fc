"""Errors and reports between a training process and its loader's process."""

from __future__ import annotations

import mmap
import os

import pytest

from penstock.loader.errors import DecodeError, FormatError
from penstock.loader.pipeline.beside.board import Board, Report
from penstock.loader.pipeline.beside.failures import describe_failure, make_error


class OddError(Exception):
    """Can be pickled, but not made again from its pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raised() -> Exception:
    try:
        try:
            try:
                raise KeyError("innermost")
            except KeyError:
                raise OddError("one", "two")  # noqa: B904 - so that it has a context
        except OddError as exc:
            raise FormatError("a.tar", "is cut short", offset=7) from exc
    except FormatError as exc:
        exc.add_note("in the source 'web'")
        return exc


def test_an_error_keeps_its_type_text_notes_and_causes() -> None:
    error = make_error(describe_failure(raised()))
    assert isinstance(error, FormatError)
    assert (str(error), error.offset) == ("a.tar at byte 7: is cut short", 7)
    assert error.__notes__ == ["in the source 'web'"]
    assert error.__suppress_context__
    cause = error.__cause__
    assert isinstance(cause, DecodeError)
    assert str(cause) == "OddError: one and two"
    assert isinstance(cause.__context__, KeyError)


def test_an_error_of_others_says_where_it_was_raised() -> None:
    try:
        raise LookupError("no such word")
    except LookupError as exc:
        error = make_error(describe_failure(exc))
    assert error.args == ("no such word",)
    (note,) = error.__notes__
    assert note.startswith("in the loader's process:\n")
    assert "test_process_messages.py" in note


def test_a_board_shows_the_newest_whole_report() -> None:
    board = Board()
    other = Board(os.dup(board.descriptor))
    assert other.read() == Report()
    for number in range(1, 6):
        board.write(Report(sent=number, totals={"spans": 2 * number}))
        assert other.read() == Report(sent=number, totals={"spans": 2 * number})
    with mmap.mmap(board.descriptor, 64 << 10) as page:  # as while it is being written
        page[64 + 20 : 64 + 40] = bytes(20)
    assert Board(os.dup(board.descriptor)).read().sent in (4, 5)
    assert other.read().sent == 5


def test_a_first_report_whose_head_is_being_written_is_none_yet() -> None:
    board = Board()
    other = Board(os.dup(board.descriptor))
    with mmap.mmap(board.descriptor, 64 << 10) as page:
        page[64:72] = (2).to_bytes(8, "little")
    assert other.read() == Report()
    board.write(Report(sent=1))
    assert other.read().sent == 1


def test_a_board_tells_how_long_the_loop_has_waited() -> None:
    board = Board()
    board.write_waits(3.0, None)
    assert board.read_waits(100.0) == 3.0
    board.write_waits(3.0, 90.0)
    assert board.read_waits(100.0) == pytest.approx(13.0)
