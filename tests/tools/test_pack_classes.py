"""The names of classes stay with the data set, and data sets that number them differently are not taken together."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packed_samples import read_samples

from penstock import DistributedDataLoader, Mixture, Source, open_manifest, pack
from penstock.cli import run
from penstock.loader import ClassNumbersWarning, ConfigError, DatasetError, inspect_dataset
from penstock.storage import MemoryStore
from penstock.tools.packing.target import Target

_FORMATS = ["tar", "parquet", "arrow", "mds", "jsonl"]


def photos(folder: Path, classes: Iterable[str]) -> Path:
    """A folder with two files in the subfolder of each class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            (folder / name / f"{number}.txt").write_text(f"{name}{number}")
    return folder


def labels(url: str | Path) -> list[tuple[str, int]]:
    """The class of each sample, as its text tells it, and its number."""
    texts = [(sample["txt"], int(sample["cls"])) for sample in read_samples(str(url))]
    return [(text.decode() if isinstance(text, bytes) else text, number) for text, number in texts]


@pytest.mark.parametrize("format_name", _FORMATS)
def test_every_format_keeps_the_names_of_classes(format_name: Any, tmp_path: Path, memory_store: MemoryStore) -> None:
    source = photos(tmp_path / "in", ["dog", "cat", "ant"])
    assert pack(source, memory_store.url, format=format_name).classes == ("ant", "cat", "dog")
    assert open_manifest(memory_store.url).classes == ("ant", "cat", "dog")
    assert inspect_dataset(memory_store.url).classes == ("ant", "cat", "dog")
    with DistributedDataLoader(memory_store.url, batch_size=1) as loader:
        assert loader.dataset.classes == ["ant", "cat", "dog"]
    for shard in (name for info in memory_store.list() if (name := info.key).startswith("shard")):
        assert open_manifest(f"{memory_store.url}/{shard}").classes == ("ant", "cat", "dog")


@pytest.mark.parametrize("format_name", _FORMATS)
def test_names_of_classes_are_kept_when_shards_are_packed_anew(format_name: Any, tmp_path: Path) -> None:
    pack(photos(tmp_path / "in", ["cat", "dog"]), tmp_path / "tar")
    assert pack(tmp_path / "tar", tmp_path / "out", format=format_name).classes == ("cat", "dog")
    assert open_manifest(tmp_path / "out").classes == ("cat", "dog")


def test_a_data_set_without_names_of_classes_has_none(tmp_path: Path) -> None:
    pack([{"txt": "a", "cls": 0}], tmp_path / "out")
    assert open_manifest(tmp_path / "out").classes is None
    with DistributedDataLoader(tmp_path / "out", batch_size=1) as loader:
        assert loader.dataset.classes is None


def test_names_of_classes_change_neither_fingerprint_nor_shards(tmp_path: Path) -> None:
    rows = [{"txt": "a", "cls": 0}, {"txt": "b", "cls": 1}]
    plain, named = pack(rows, tmp_path / "a"), pack(rows, tmp_path / "b", classes=["x", "y"])
    assert plain.fingerprint == named.fingerprint
    assert (tmp_path / "a" / "shard-000000.tar").read_bytes() == (tmp_path / "b" / "shard-000000.tar").read_bytes()
    assert open_manifest(tmp_path / "b").classes == ("x", "y")
    assert open_manifest(tmp_path / "b").schema == open_manifest(tmp_path / "a").schema


def _places(folder: Path, given: Any) -> Any:
    """``given`` for ``classes=``: a list of names, or the name and text of a file that is written for it."""
    if isinstance(given, list):
        return given
    name, text = given
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    "given",
    [
        ["dog", "ant", "cat"],
        ("names.txt", "dog\nant\n\ncat\n"),
        ("labels", "dog\r\nant\r\ncat"),
        ("names.json", '["dog", "ant", "cat"]'),
        ("names.json", '{"ant": 1, "cat": 2, "dog": 0}'),
        ("names.json", '{"0": "dog", "2": "cat", "1": "ant"}'),
    ],
)
def test_classes_are_numbered_in_the_order_that_is_given(given: Any, tmp_path: Path) -> None:
    source = photos(tmp_path / "in", ["cat", "dog"])
    assert pack(source, tmp_path / "out", classes=_places(tmp_path, given)).classes == ("dog", "ant", "cat")
    assert labels(tmp_path / "out") == [("cat0", 2), ("cat1", 2), ("dog0", 0), ("dog1", 0)]


def test_a_split_takes_the_numbers_of_another_one_on_any_store(tmp_path: Path, memory_store: MemoryStore) -> None:
    photos(tmp_path / "in" / "train", ["ant", "cat", "dog"])
    photos(tmp_path / "in" / "val", ["dog"])
    pack(tmp_path / "in" / "train", f"{memory_store.url}/train")
    pack(tmp_path / "in" / "val", f"{memory_store.url}/val", classes=f"{memory_store.url}/train")
    assert labels(f"{memory_store.url}/val") == [("dog0", 2), ("dog1", 2)]
    assert open_manifest(f"{memory_store.url}/val").classes == ("ant", "cat", "dog")
    assert open_manifest(memory_store.url, split="all").classes == ("ant", "cat", "dog")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "give the names of the classes"),
        (["a", "a"], "names 'a' twice"),
        (["a", ""], "give the names of the classes"),
        (7, "give a list of names"),
        (("names.json", '{"a": 1, "b": 2}'), "numbers are not 0 to 1"),
        (("names.json", "7"), "has no names of classes"),
        (("names.txt", ""), "give the names of the classes"),
    ],
)
def test_classes_that_are_no_list_of_names_are_refused(given: Any, words: str, tmp_path: Path) -> None:
    given = given if isinstance(given, int) else _places(tmp_path, given)
    with pytest.raises(ConfigError, match=words):
        pack(photos(tmp_path / "in", ["cat", "dog"]), tmp_path / "out", classes=given)


def test_classes_that_do_not_fit_the_source_are_refused(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", ["cat", "dog"])
    with pytest.raises(DatasetError, match="its folder 'dog' is none of the 2 classes"):
        pack(source, tmp_path / "out", classes=["cat", "ant"])
    (source / "loose.txt").write_text("x")
    with pytest.raises(DatasetError, match="this file lies in none"):
        pack(source, tmp_path / "out", classes=["cat", "dog"])
    with pytest.raises(ConfigError, match="format='tokens' has not"):
        pack([[1, 2]], tmp_path / "out", format="tokens", seq_len=2, classes=["cat"])
    pack([{"txt": "a"}], tmp_path / "bare")
    with pytest.raises(ConfigError, match="has no names of classes"):
        pack(source, tmp_path / "out", classes=tmp_path / "bare")
    (source / "loose.txt").unlink()
    pack(source, tmp_path / "named")
    with pytest.raises(ConfigError, match="0 in 'cls' is 'cat' there, and 'dog' in classes="):
        pack(tmp_path / "named", tmp_path / "out", classes=["dog", "cat"])


def test_a_split_that_is_packed_beside_one_of_other_numbers_warns(tmp_path: Path) -> None:
    pack(photos(tmp_path / "in" / "train", ["ant", "cat", "dog"]), tmp_path / "out" / "train")
    val = photos(tmp_path / "in" / "val", ["cat", "dog"])
    with pytest.warns(ClassNumbersWarning, match=r"0 in 'cls' is 'cat' here and 'ant' there; pack it with classes="):
        pack(val, tmp_path / "out" / "val")
    pack(val, tmp_path / "out" / "valid", classes=tmp_path / "out" / "train")  # warns of nothing


def _loads_quietly(source: Any, **options: Any) -> list[str] | None:
    with warnings.catch_warnings(), DistributedDataLoader(source, batch_size=1, **options) as loader:
        warnings.simplefilter("error")
        return loader.dataset.classes


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Two splits that number their classes differently, and a third that fits the first."""
    out = tmp_path / "out"
    pack(photos(tmp_path / "in" / "train", ["ant", "cat", "dog"]), out / "one" / "train")
    pack(photos(tmp_path / "in" / "val", ["cat", "dog"]), out / "other" / "val")
    pack(tmp_path / "in" / "val", out / "one" / "val", classes=out / "one" / "train")
    return out


def test_mixed_data_sets_of_other_numbers_warn(apart: Path) -> None:
    train, val, fits = apart / "one" / "train", apart / "other" / "val", apart / "one" / "val"
    with pytest.warns(ClassNumbersWarning, match=r"0 in 'cls' is 'ant' in 'train' and 'cat' in 'val'"):
        DistributedDataLoader(Mixture({"train": Source(train), "val": Source(val)}), batch_size=2).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataLoader(Mixture({"train": Source(train), "val": Source(fits)}), batch_size=2).close()
        texts = Mixture({"train": Source(train), "val": Source(val)})
        DistributedDataLoader(texts, batch_size=2, columns=["txt"]).close()


def test_splits_of_other_numbers_that_are_read_as_one_data_set_warn_every_time(apart: Path, tmp_path: Path) -> None:
    mixed = {"split": "all", "cache_dir": tmp_path / "cache"}
    assert _loads_quietly(apart / "one", **mixed) == ["ant", "cat", "dog"]
    (apart / "one" / "val").rename(apart / "val")
    (apart / "other" / "val").rename(apart / "one" / "val")
    for _ in range(2):  # built, then from the node's cache
        with (
            pytest.warns(ClassNumbersWarning, match="its parts number classes differently"),
            DistributedDataLoader(apart / "one", batch_size=2, **mixed) as loader,  # type: ignore[arg-type]
        ):
            assert loader.dataset.classes is None
    assert _loads_quietly(apart / "one", split="train") == ["ant", "cat", "dog"]


def test_indexing_anew_keeps_the_names_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(photos(tmp_path / "in", ["cat", "dog"]), tmp_path / "out", shard_bytes=3000)
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert run(["index", str(tmp_path / "out"), "--rebuild"]) == 0
    assert open_manifest(tmp_path / "out").classes == ("cat", "dog")
    shards[0].unlink()
    assert run(["index", str(tmp_path / "out")]) == 0
    assert open_manifest(tmp_path / "out").classes == ("cat", "dog")
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "out")]) == 0
    assert "classes      0 = cat, 1 = dog\n" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(("classes", "goes_on"), [(["dog", "cat"], True), (["cat", "dog", "ant"], False)])
def test_an_interrupted_pack_goes_on_with_the_same_classes_alone(
    classes: list[str], goes_on: bool, tmp_path: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = photos(tmp_path / "in", ["cat", "dog"])

    def put_two(self: Target, shards: Iterable[Any]) -> None:
        put_all(self, itertools.islice(shards, 2))
        self._save()
        raise KeyboardInterrupt

    put_all = Target.put_all
    monkeypatch.setattr(Target, "put_all", put_two)
    with pytest.raises(KeyboardInterrupt):
        pack(source, memory_store.url, classes=["dog", "cat"], shard_bytes=2000)
    monkeypatch.undo()
    summary = pack(source, memory_store.url, classes=classes, shard_bytes=2000)
    assert summary.kept_shards == (2 if goes_on else 0)
    assert open_manifest(memory_store.url).classes == tuple(classes)
    assert [number for _, number in labels(memory_store.url)] == [
        classes.index(name) for name in ("cat", "cat", "dog", "dog")
    ]


def test_the_command_takes_names_a_file_or_a_data_set(tmp_path: Path) -> None:
    source = str(photos(tmp_path / "in", ["cat", "dog"]))
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    for number, classes in enumerate(["dog,cat", str(tmp_path / "names.txt"), str(tmp_path / "0")]):
        assert run(["pack", source, str(tmp_path / str(number)), "--classes", classes]) == 0
        assert open_manifest(tmp_path / str(number)).classes == ("dog", "cat")
