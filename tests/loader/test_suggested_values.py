"""Values of arguments that are not known: errors name those that there are, and the one that was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import (
    DistributedDataLoader,
    ImageDecoder,
    Mixture,
    Packing,
    PenstockError,
    SequenceCut,
    TokensFormat,
    pack,
)

SAMPLES = [{"txt": f"text {n}", "cls": n, "jpg": b"x"} for n in range(8)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation"):
        pack(SAMPLES, folder / split, progress=False)
    pack([{"price": 1.0, "name": "a"}] * 4, folder / "table", format="parquet", progress=False)
    return folder


@pytest.mark.parametrize(
    ("place", "arguments", "meant"),
    [
        ("table", {"columns": ["Price"]}, "price"),
        ("table", {"columns": ["name", "pric"]}, "price"),
        ("train", {"columns": ["text"]}, "txt"),
        ("train", {"columns": ["_key_"]}, "__key__"),
        ("train", {"decode": {"jgp": None}}, "jpg"),
        ("train", {"decode": "atuo"}, "auto"),
        ("train", {"last_batch": "pd"}, "pad"),
        ("train", {"on_error": "skp"}, "skip"),
        ("train", {"raw": "veiw"}, "view"),
        ("train", {"lanes": "aut"}, "auto"),
        ("train", {"window": "aut"}, "auto"),
        ("train", {"piece": "aut"}, "auto"),
        ("train", {"threads": "aut"}, "auto"),
        ("train", {"fetch_threads": "aut"}, "auto"),
        ("train", {"autotune": "aut"}, "auto"),
        ("train", {"device": "cdua"}, "cuda"),
        ("train", {"format": "parqet"}, "parquet"),
        ("train", {"packing": Packing(seq_len=8, field="text")}, "txt"),
        ("", {"split": "trian"}, "train"),
        ("", {"split": ["train", "validaton"]}, "validation"),
        ("", {"split": "al"}, "all"),
        ("train", {"storage_options": {"mapped_reads": "veiws"}}, "views"),
    ],
)
def test_an_unknown_value_is_refused_with_the_one_that_was_meant(
    data: Path, place: str, arguments: dict[str, Any], meant: str
) -> None:
    with pytest.raises(PenstockError, match=rf"; did you mean '{meant}'\?$"):
        DistributedDataLoader(data / place, batch_size=2, **arguments)


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: ImageDecoder(size=8, crop="randm"), "random"),  # type: ignore[arg-type]
        (lambda: ImageDecoder(layout="chv"), "chw"),  # type: ignore[arg-type]
        (lambda: ImageDecoder(size=8, device="cdua"), "cuda"),  # type: ignore[arg-type]
        (lambda: Packing(seq_len=8, method="best"), "best_fit"),  # type: ignore[arg-type]
        (lambda: Packing(seq_len=8, fields=["token"]), "tokens"),
        (lambda: Mixture({"a": 1.0}, stop="first"), "first_exhausted"),  # type: ignore[arg-type]
        (lambda: Mixture({"web": 1.0}, schedule={10: {"wbe": 2.0}}), "web"),
        (lambda: SequenceCut(["tokens"], order="head"), "head_tail"),  # type: ignore[arg-type]
        (lambda: TokensFormat(seq_len=8, dtype="unt16"), "uint16"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(make: Any, meant: str) -> None:
    with pytest.raises(PenstockError, match=rf"; did you mean '{meant}'\?"):
        make()


def test_no_columns_at_all_are_refused_with_what_to_write(data: Path) -> None:
    with pytest.raises(PenstockError, match=r"columns=\[\] reads nothing; leave columns= out .*'name', 'price'"):
        DistributedDataLoader(data / "table", batch_size=2, columns=[])
