"""Which loose files ``pack`` makes one sample of: by their names, as all names of the folder tell."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packed_samples import read_samples

from penstock import pack
from penstock.cli import run
from penstock.loader import ConfigError, DatasetError, PackSummary

_FORMATS = ["tar", "parquet", "arrow", "mds", "jsonl"]


def made(folder: Path, names: Iterable[str]) -> Path:
    """A folder of files that hold their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def packed(tmp_path: Path, names: Iterable[str], **options: Any) -> tuple[dict[str, list[str]], PackSummary]:
    """The fields of each sample, by key, and the summary."""
    summary = pack(made(tmp_path / "in", names), tmp_path / "out", **options)
    samples = read_samples(str(tmp_path / "out"))
    assert summary.samples == len(samples)
    return {
        sample["__key__"]: sorted(name for name, value in sample.items() if value is not None and name != "__key__")
        for sample in samples
    }, summary


@pytest.mark.parametrize("format_name", _FORMATS)
def test_dots_in_names_are_part_of_the_key_in_every_format(format_name: Any, tmp_path: Path) -> None:
    names = [f"{animal}.{number}.txt" for animal in ("cat", "dog") for number in range(4)]
    found, summary = packed(tmp_path, names, format=format_name)
    assert found == {f"{animal}_{number}": ["txt"] for animal in ("cat", "dog") for number in range(4)}
    assert summary.notes == ("dots in names belong to the key, as '_': cat.0.txt is field 'txt' of sample 'cat_0'",)


def test_a_tar_of_dotted_names_has_them_for_every_reader(tmp_path: Path) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    names = ["my photo.v2.jpg", "J. Smith.jpg", "2024.01.02.jpg", "plain.jpg"]
    packed(tmp_path, names)
    shard = tmp_path / "out" / "shard-000000.tar"
    with shard.open("rb") as file:
        theirs = list(group_by_keys(member | {"__url__": "x"} for member in tar_file_iterator(file)))
    assert sorted(sample["jpg"].decode() for sample in theirs) == sorted(names)
    with tarfile.open(shard) as archive:
        assert all(name.count(".") == 1 for name in archive.getnames())


@pytest.mark.parametrize(
    ("names", "samples"),
    [
        (["a.jpg", "a.seg.png", "a.json", "b.jpg"], {"a": ["jpg", "json", "seg.png"], "b": ["jpg"]}),
        (["a.left.jpg", "a.right.jpg", "b.left.jpg", "b.right.jpg"], {key: ["left.jpg", "right.jpg"] for key in "ab"}),
        (["a.seg.png", "b.seg.png"], {key: ["seg.png"] for key in "ab"}),
        (["a.seg.png"], {"a": ["seg.png"]}),
        (["a.nii.gz", "b.nii.gz", "a.cls", "b.cls"], {key: ["cls", "nii.gz"] for key in "ab"}),
        (["v1.0/a.jpg", "v1.0/a.cls"], {"v1.0/a": ["cls", "jpg"]}),
        (["scan.1.nii.gz", "scan.2.nii.gz"], {key: ["nii.gz"] for key in ["scan_1", "scan_2"]}),
        (["x.1.jpg", "x.1.cls", "y.2.jpg", "y.2.cls"], {key: ["cls", "jpg"] for key in ["x_1", "y_2"]}),
        (["a.b/cat.0.jpg", "a.b/dog.0.1.jpg"], {key: ["jpg"] for key in ["a.b/cat_0", "a.b/dog_0_1"]}),
        (["holiday.final.jpg", "a.jpg", "b.jpg"], {key: ["jpg"] for key in ["a", "b", "holiday_final"]}),
        (["cat.0.jpg", "cat_0.jpg"], {key: ["jpg"] for key in ["cat-0", "cat_0"]}),
        (
            ["a.1_2.jpg", "a.1.2.jpg", "a_1-2.jpg", "a-1.2.jpg"],
            {key: ["jpg"] for key in ["a~1_2", "a~1~2", "a_1-2", "a-1~2"]},
        ),
        (
            ["a.jpg", "a.seg.png", "J. Smith.jpg", "J. Smith.seg.png"],
            {key: ["jpg", "seg.png"] for key in ["a", "J_ Smith"]},
        ),
    ],
)
def test_the_names_of_a_folder_tell_where_keys_end(
    names: list[str], samples: dict[str, list[str]], tmp_path: Path
) -> None:
    assert packed(tmp_path, names)[0] == samples


@pytest.mark.parametrize(
    "names",
    [
        ["photo.jpg", "photo.1.jpg", "photo.2.jpg"],  # views, or copies
        [f"scene{number}.{view}.jpg" for number in range(4) for view in range(2)],  # views, or numbered pictures
        ["J.Smith.jpg", "J.Doe.jpg", "J.Roe.jpg"],  # one sample, or three
        ["cat.alice.jpg", "cat.bob.jpg", "dog.alice.jpg", "dog.carol.jpg"],
        [f"{animal}.{name}.jpg" for animal in ("cat", "dog") for name in ("alice", "bob", "carol")],
    ],
)
def test_names_that_do_not_tell_are_refused_with_what_to_say(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"do not tell where the key ends.*extensions=\['jpg'\]"):
        packed(tmp_path, names)
    found, _ = packed(tmp_path, names, extensions=["jpg"])
    assert found == {name[:-4].replace(".", "_"): ["jpg"] for name in sorted(names)}


def test_chosen_extensions_are_the_fields_and_other_files_are_left_out(tmp_path: Path) -> None:
    names = ["photo.jpg", "photo.1.jpg", "photo.LEFT.jpg", "notes.doc", "README"]
    found, summary = packed(tmp_path, names, extensions=["JPG", ".left.jpg", "1.jpg"])
    assert found == {"photo": ["1.jpg", "jpg", "left.jpg"]}
    assert summary.notes == ("2 files with other extensions are left out (none, .doc)",)
    assert run(["pack", str(tmp_path / "in"), str(tmp_path / "two"), "--extensions", "jpg"]) == 0
    assert len(read_samples(str(tmp_path / "two"))) == 3


def test_extensions_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = made(tmp_path / "in", ["a.jpg"])
    with pytest.raises(ConfigError, match="give endings of files"):
        pack(source, tmp_path / "out", extensions=[])
    with pytest.raises(DatasetError, match=r"no file ends in png; their endings are \.jpg"):
        pack(source, tmp_path / "out", extensions=["png"])
    with pytest.raises(ConfigError, match="extensions= chooses among loose files"):
        pack(source, tmp_path / "out", extensions=["jpg"], source_format="tar")
    with pytest.raises(ConfigError, match="not to an iterable"):
        pack([{"txt": "a"}], tmp_path / "out", extensions=["jpg"])


def test_hidden_files_and_those_of_systems_are_left_out_and_told(tmp_path: Path) -> None:
    junk = ["cat/Thumbs.db", "desktop.ini", ".DS_Store", "__MACOSX/cat/._1.jpg", "dog/@eaDir/1.jpg/thumb.jpg"]
    found, summary = packed(tmp_path, ["cat/1.txt", "dog/1.txt", *junk])
    assert found == {"cat/1": ["cls", "txt"], "dog/1": ["cls", "txt"]}
    assert summary.classes == ("cat", "dog")
    assert summary.notes[0].startswith("hidden and system files are left out: 5 (")


def test_files_of_systems_beside_tables_and_shards_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("n\n1\n")
    (tmp_path / "in" / "Thumbs.db").write_text("")
    assert pack(tmp_path / "in", tmp_path / "out", format="parquet").samples == 1
    (tmp_path / "out" / "penstock-manifest.arrow").unlink()
    (tmp_path / "out" / "desktop.ini").write_text("")
    assert pack(tmp_path / "out", tmp_path / "again", format="parquet").samples == 1
