from __future__ import annotations

import pytest

from penstock.storage import UnsupportedURLError, open_client
from penstock.storage.suggestions import did_you_mean, list_some, nearest, unknown_choice


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("Price", ["price", "name"], "price"),
        ("PRICE", ["price", "Name"], "price"),
        ("trian", ["train", "validation"], "train"),
        ("first", ["first_exhausted", "never"], "first_exhausted"),
        ("fir", ["first", "fire"], "fire"),
        ("pd", ["drop", "pad", "partial"], "pad"),
        ("x", ["price"], None),
        ("", ["price"], None),
        (3, ["price"], None),
        ("price", [3, None], None),
        ("price", ["price", "prices"], None),
    ],
)
def test_the_word_that_is_written_most_like_another_is_suggested(
    word: object, known: list[object], meant: str | None
) -> None:
    assert nearest(word, known) == meant


def test_several_unknown_words_get_one_question() -> None:
    assert did_you_mean(["Price", "zzz", "nme"], ["price", "name"]) == "; did you mean 'price' and 'name'?"
    assert did_you_mean(["zzz"], ["price", "name"]) == did_you_mean([], ["price"]) == ""
    assert unknown_choice("order", "up", ("down", None)) == "order='up': must be 'down' or None"


@pytest.mark.parametrize(
    ("url", "option", "meant"),
    [
        ("s3://b/x/", "endpont", "endpoint"),
        ("s3://b/x/", "acess_key", "access_key"),
        ("s3://b/x/", "timout_s", "timeout_s"),
        ("s3a://b/x/", "virtual_hosted_style_requests", "virtual_hosted_style_request"),
        ("gs://b/x/", "servce_account", "service_account"),
        ("az://b/x/", "acount_name", "account_name"),
        ("https://h/x/", "default_header", "default_headers"),
        ("/tmp/x", "maped_reads", "mapped_reads"),
    ],
)
def test_an_unknown_option_of_a_store_is_refused_with_the_one_that_was_meant(url: str, option: str, meant: str) -> None:
    with pytest.raises(UnsupportedURLError, match=rf"{option}.*; did you mean '{meant}'\?") as caught:
        open_client(url, {option: "a-value-0123456789"})
    assert "a-value" not in str(caught.value)


def test_an_unknown_scheme_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnsupportedURLError, match=r"did you mean 'https'\?"):
        open_client("htps://host/x/")


def test_a_long_list_of_names_ends_with_their_number() -> None:
    assert list_some(["a", "b", "c"], 3) == "a, b, c"
    assert list_some({3: "x", 5: "y", 8: "z"}, 2) == "3, 5 and 1 more"
    assert list_some([], 2) == ""
