"""Errors in the command line's words."""

from __future__ import annotations

import io

import pytest

from penstock.cli import run
from penstock.cli.screen import Screen, print_columns, print_grid
from penstock.cli.words import option_words

OPTIONS = ("global_batch_size", "last_batch", "tokenizer", "overwrite", "seq_len", "format", "dtype", "lanes")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("give tokenizer=, a function", "give --tokenizer, a function"),
        ("use dtype='uint32'", "use --dtype uint32"),
        ("lanes=12 is not a power of two", "--lanes 12 is not a power of two"),
        ("last_batch='drop' leaves nothing; use last_batch='pad' or 'partial'",
         "--last-batch drop leaves nothing; use --last-batch pad or partial"),
        ("give overwrite=True (--overwrite) to replace", "give --overwrite to replace"),
        ("give overwrite=True to replace", "give --overwrite to replace"),
        ("give it with format=TokensFormat(seq_len=2048), or --seq-len 2048 on the command line",
         "give it with --seq-len 2048"),
        ("read their documents with format=TokenDocumentsFormat() (--format token_documents)",
         "read their documents with --format token_documents"),
        ("as in format=TokenDocumentsFormat(eos=2) (--eos 2)", "as in --eos 2"),
        ("choose one with format='jsonl' (--format), or", "choose one with --format, or"),
        ("a key a=b, my_lanes=3, x.lanes=4", "a key a=b, my_lanes=3, x.lanes=4"),
        ("format='': is none", "--format '': is none"),
    ],
)  # fmt: skip
def test_arguments_are_told_as_options(message: str, told: str) -> None:
    assert option_words(message, OPTIONS) == told


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspct"]) == 2
    assert "did you mean 'inspect'?" in capsys.readouterr().err


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["pack", "a", "b", "--tokeniser", "x:y"])
    assert "--tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("width", range(12, 60))
def test_no_width_of_a_terminal_cuts_a_table(width: int) -> None:
    cells = [["ranks", "8", "1,024"], ["lanes × window", "16 × 4,096", "2,048 × 64"], ["数据", "一二三", "0 (0.0%)"]]
    for draw in (print_grid, print_columns):
        screen = Screen(width=width, file=io.StringIO())
        draw(screen, cells[0], cells[1:])
        told = screen.file.getvalue()  # type: ignore[attr-defined]
        assert all(cell in told for row in cells for cell in row), told


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["inspect", "x", "--format", "parqet"], "parquet"),
        (["plan", "x", "--last-batch=pd"], "pad"),
        (["export", "x", "--dtype", "bf1"], "bf16"),
        (["bench", "x", "--against", "webdatset"], "webdataset"),
        (["inspect", "s3://b/x/", "--storage-option", "endpont=http://h"], "endpoint"),
    ],
)
def test_an_unknown_choice_of_an_option_is_refused_with_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean '{meant}'?\n")
