"""Links in an archive have the content of what they name, and samples whose members stand apart are told."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from made_archives import index, read

from penstock import DistributedDataLoader, open_manifest, verify
from penstock.cli import run
from penstock.loader import DoubtfulDatasetWarning
from penstock.loader.errors import FormatError
from penstock.loader.formats.tar import links

Entry = tuple[str, bytes | str, bytes]  # name, data or what is named, kind

HARD, SYMBOLIC, FILE = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.REGTYPE
DIALECTS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def archive(*entries: Entry, dialect: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=dialect) as tar:
        for name, content, kind in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def unpacked(data: bytes) -> list[dict[str, Any]]:
    """What unpacking gives: each member's content by the standard library, grouped as they follow each other."""
    rows: list[dict[str, Any]] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            if not (info.isreg() or info.islnk() or info.issym()):
                continue
            key, _, field = info.name.partition(".") if "/" not in info.name else (*info.name.rpartition("."),)
            content = tar.extractfile(info)
            assert content is not None
            if not rows or rows[-1]["__key__"] != key:
                rows.append({"__key__": key})
            rows[-1][field] = content.read()
    fields = sorted({field for row in rows for field in row} - {"__key__"})
    return [{"__key__": row["__key__"], **{field: row.get(field) for field in fields}} for row in rows]


@pytest.mark.parametrize("option", ["--format=gnu", "--format=posix", "--format=ustar"])
def test_files_that_are_hard_links_of_each_other_are_samples_each(tmp_path: Path, option: str) -> None:
    """As GNU tar writes them, through the loader."""
    files, shards = tmp_path / "files", tmp_path / "shards"
    files.mkdir()
    shards.mkdir()
    (files / "1.txt").write_text("A")
    for name in ("2.txt", "3.txt"):
        os.link(files / "1.txt", files / name)
    (files / "4.txt").symlink_to("2.txt")
    subprocess.run(["tar", "cf", shards / "a.tar", option, "--sort=name", "-C", files, "."], check=True)
    with DistributedDataLoader(str(shards), batch_size=9, shuffle=False, last_batch="partial") as loader:
        batch = next(iter(loader))
    assert batch["__key__"] == ["./1", "./2", "./3", "./4"]
    assert batch["txt"] == ["A"] * 4
    assert verify(shards).ok


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk_bytes", [512, 4096, 1 << 20])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_links_read_as_unpacking_reads_them(tmp_path: Path, dialect: int, chunk_bytes: int) -> None:
    rng = random.Random(dialect)
    for _ in range(40):
        entries: list[Entry] = []
        for sample in range(rng.randrange(1, 12)):
            for field in ("cls", "jpg"):
                name = f"d/{sample:03d}.{field}"
                earlier = [entry[0] for entry in entries]
                if earlier and rng.random() < 0.5:
                    kind = rng.choice((HARD, SYMBOLIC))
                    target = rng.choice(earlier)
                    entries.append((name, target if kind == HARD else target.removeprefix("d/"), kind))
                else:
                    entries.append((name, rng.randbytes(rng.choice((0, 3, 700))), FILE))
        data = archive(*entries, dialect=dialect)
        expected = unpacked(data)
        assert read(tmp_path, data, chunk_bytes=chunk_bytes) == expected
        (tmp_path / "s.tar").unlink()
        assert read(tmp_path, gzip.compress(data, 1), "s.tar.gz") == expected
        (tmp_path / "s.tar.gz").unlink()


def test_a_link_and_what_it_names_are_in_one_chunk_and_others_are_cut_as_ever(tmp_path: Path) -> None:
    big = bytes(4000)
    plain = [(f"{i}.x", big, FILE) for i in range(8)]
    apart = index(tmp_path, archive(*plain), form=None)
    data = archive(*plain[:5], ("5.x", "3.x", HARD), *plain[6:])
    chunks = index(tmp_path, data, form=links_format(4096)).chunks
    assert [chunk.samples for chunk in chunks] == [1, 1, 1, 3, 1, 1]
    assert sum(chunk.samples for chunk in apart.chunks) == 8


def links_format(chunk_bytes: int) -> Any:
    from penstock import TarFormat

    return TarFormat(chunk_bytes=chunk_bytes)


def test_links_forward_to_long_names_and_to_members_of_no_sample_are_read(tmp_path: Path) -> None:
    long = "d/" + "n" * 150 + ".txt"
    data = archive(
        ("blank", b"shared", FILE),
        ("a.txt", "blank", HARD),
        ("b.txt", long, SYMBOLIC),
        (long, b"long", FILE),
        ("e/" + "m" * 150 + ".txt", long, HARD),
        ("f.txt", "./f/../b.txt", SYMBOLIC),
        dialect=tarfile.PAX_FORMAT,
    )
    for chunk_bytes in (512, 1 << 20):
        rows = read(tmp_path, data, chunk_bytes=chunk_bytes)
        assert [row["txt"] for row in rows] == [b"shared", b"long", b"long", b"long", b"long"]


def test_a_hard_link_to_nothing_in_the_archive_is_refused_with_what_to_do(tmp_path: Path) -> None:
    entry, words = ("b.txt", "gone.txt", HARD), r"'b.txt' is a hard link to 'gone.txt'.*--hard-dereference"
    with pytest.raises(FormatError, match=words) as refused:
        index(tmp_path, archive(("a.txt", b"1", FILE), entry))
    assert refused.value.offset == 1024
    with pytest.raises(FormatError, match=words):
        index(tmp_path, archive(entry))


def test_a_symbolic_link_out_of_the_archive_is_left_out_and_told(tmp_path: Path) -> None:
    data = archive(("a.txt", b"1", FILE), ("b.txt", "../blobs/1234", SYMBOLIC), ("c.txt", b"3", FILE))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.tar").write_bytes(data)
    words = r"'b.txt' is a symbolic link to '../blobs/1234'.*left out.*--dereference"
    with (
        pytest.warns(DoubtfulDatasetWarning, match=words),
        DistributedDataLoader(tmp_path / "data", batch_size=2, shuffle=False, decode=None) as loader,
    ):
        assert next(iter(loader))["txt"] == [b"1", b"3"]
    assert [flaw.problem for flaw in verify(tmp_path / "data", progress=False).flaws if "b.txt" in flaw.problem]


def test_links_that_are_no_part_of_a_sample_are_passed_over(tmp_path: Path) -> None:
    data = archive(
        ("latest", "/gone", SYMBOLIC), ("v1.0/a.txt", b"1", FILE), ("v1.1", "v1.0", SYMBOLIC), ("b.txt", b"2", FILE)
    )
    assert [row["txt"] for row in read(tmp_path, data)] == [b"1", b"2"]


def test_a_link_too_far_from_what_it_names_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_TIED_BYTES", 10_000)
    near = [("a.txt", b"1", FILE), ("b.txt", "a.txt", HARD)]
    assert len(read(tmp_path, archive(*near, ("z.txt", bytes(20_000), FILE)))) == 3
    assert len(read(tmp_path, archive(("a.x", b"1", FILE), ("a.y", bytes(20_000), FILE), ("a.z", "a.x", HARD)))) == 1
    far = archive(("a.txt", b"1", FILE), ("m.txt", bytes(20_000), FILE), ("z.txt", "a.txt", HARD))
    with pytest.raises(FormatError, match=r"'z.txt' is a hard link to 'a.txt'.*too far.*--hard-dereference"):
        index(tmp_path, far)
    (tmp_path / "s.tar").unlink()
    assert [row["txt"][:1] for row in read(tmp_path, gzip.compress(far), "s.tar.gz")] == [b"1", b"\0", b"1"]


APART = (("1.txt", b"t1", FILE), ("2.txt", b"t2", FILE), ("1.cls", b"1", FILE), ("2.cls", b"2", FILE))
APPENDED = (("1.txt", b"old", FILE), ("2.txt", b"x", FILE), ("1.txt", b"new", FILE))
MANY = tuple((f"{i:03d}.txt", b"x", FILE) for i in range(100))


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
@pytest.mark.parametrize("before", [(), MANY])
def test_a_sample_whose_members_do_not_follow_each_other_is_refused(
    tmp_path: Path, name: str, before: tuple[Entry, ...]
) -> None:
    data = archive(*before, *APART)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    offset = 1024 * (len(before) + 2)
    with pytest.raises(FormatError, match=r"'1.cls' is of the sample '1', which began with '1.txt'.*--sort=name") as no:
        open_manifest(tmp_path)
    assert no.value.offset == offset
    assert [flaw.offset for flaw in verify(tmp_path).flaws] == [offset]


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
def test_a_sample_that_was_appended_anew_is_told_once_and_both_are_read(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = archive(*MANY, *APPENDED)
    cache = tmp_path / ".cache"
    for shard in (name, f"more-{name}"):
        (tmp_path / shard).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.warns(DoubtfulDatasetWarning) as told:
        manifest = open_manifest(tmp_path, cache_dir=cache)
    assert len(told) == 1
    assert "key '1' comes again at byte 104448 ('1.txt' after '1.txt'; 1 such pairs)" in str(told[0].message)
    assert "1 more of its shards" in str(told[0].message)
    assert manifest.num_samples == 206
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_manifest(tmp_path, cache_dir=cache).num_samples == 206
    assert run(["index", str(tmp_path), "--rebuild"]) == 0
    assert "key '1' comes again" in " ".join(capsys.readouterr().err.split())
    flaws = verify(tmp_path).flaws
    assert [(flaw.shard, flaw.kind) for flaw in flaws] == [(f"more-{name}", "Doubtful"), (name, "Doubtful")]


@pytest.mark.slow
def test_keys_that_come_again_are_found_however_far_apart_and_in_any_number_of_fields(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(60):
        entries = [
            (f"{rng.randrange(6)}.{field}", b"x" * rng.choice((1, 5000)), FILE)
            for _ in range(rng.randrange(1, 30))
            for field in rng.sample([f"f{i}" for i in range(70)], rng.randrange(1, 3))
        ]
        samples: list[tuple[str, set[str]]] = []
        for name, _, _ in entries:
            key, _, field = name.partition(".")
            if not samples or samples[-1][0] != key:
                samples.append((key, set()))
            if field in samples[-1][1]:
                break
            samples[-1][1].add(field)
        else:
            again = len({key for key, _ in samples}) < len(samples)
            try:
                found = index(tmp_path, archive(*entries))
            except FormatError:
                assert any(
                    one[0] == two[0] and not one[1] & two[1]
                    for i, one in enumerate(samples)
                    for two in samples[i + 1 :]
                )
            else:
                assert bool(found.doubt) == again
