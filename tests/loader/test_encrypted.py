"""An encrypted data set does all that a plain one does, gives the same batches, and gives nothing without its key."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader
from penstock.cli import run as run_command
from penstock.loader import BadChunkWarning, DatasetError, pack, verify
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.storage import DecryptionError

KEY = bytes(range(32))
SECRET_TEXT = "the patient said that it hurts"
OPTIONS = {"encryption_key": KEY}


def samples(count: int = 40) -> list[dict[str, Any]]:
    return [{"__key__": f"{i:04}", "txt": f"{SECRET_TEXT} {i}", "n": i} for i in range(count)]


def pack_both(folder: Path, kind: Any) -> tuple[Path, Path]:
    """A data set of several shards and chunks, plain and encrypted."""
    for name, options in (("plain", None), ("secret", OPTIONS)):
        pack(samples(), folder / name, format=kind, shard_bytes=8000, progress=False, storage_options=options)
    return folder / "plain", folder / "secret"


def batches(source: Path, options: Any = None, **more: Any) -> list[dict[str, Any]]:
    with DistributedDataLoader(
        source, batch_size=4, shuffle=True, seed=3, storage_options=options, with_ids=True, **more
    ) as loader:
        return [{name: list(map(str, batch[name])) for name in ("__id__", "txt")} for batch in loader]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["tar", "parquet", "mds", "jsonl", "arrow"])
def test_an_encrypted_data_set_gives_the_batches_of_the_plain_one(tmp_path: Path, kind: str) -> None:
    plain, secret = pack_both(tmp_path, kind)
    assert batches(secret, OPTIONS) == batches(plain)
    stored = b"".join(path.read_bytes() for path in secret.iterdir())
    assert SECRET_TEXT.encode() not in stored
    assert all(path.name.endswith(".penc") for path in secret.iterdir())
    with DistributedDataLoader(plain, batch_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DistributedDataLoader(secret, batch_size=4, storage_options=OPTIONS) as loader:
        loader.load_state_dict(state)
    assert verify(secret, storage_options=OPTIONS, progress=False).flaws == ()


@pytest.mark.slow
def test_worker_processes_and_a_callable_key_read_it(tmp_path: Path) -> None:
    _, secret = pack_both(tmp_path, "tar")
    expected = batches(secret, OPTIONS)
    assert batches(secret, {"encryption_key": read_key}, processes=1, transform=keep) == expected


def read_key() -> bytes:
    return KEY


def keep(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def test_without_the_key_or_with_another_it_says_what_to_give(tmp_path: Path) -> None:
    _, secret = pack_both(tmp_path, "tar")
    with pytest.raises(DatasetError, match=r"is encrypted \(.*\.penc, \.\.\.\); give storage_options=.*encryption_key"):
        DistributedDataLoader(secret, batch_size=4)
    with pytest.raises(DecryptionError, match="encrypted with another key"):
        DistributedDataLoader(secret, batch_size=4, storage_options={"encryption_key": bytes(32)})
    plain = tmp_path / "plain"
    with pytest.raises(DecryptionError, match="nothing there is encrypted"):
        DistributedDataLoader(plain, batch_size=4, storage_options=OPTIONS)


def test_an_exchanged_shard_or_manifest_is_refused_not_read_as_another(tmp_path: Path) -> None:
    _, secret = pack_both(tmp_path, "tar")
    shards = sorted(secret.glob("shard-*"))
    assert len(shards) > 2
    first = shards[0].read_bytes()
    shutil.copy(shards[1], shards[0])
    with pytest.raises(DecryptionError, match=r"shard-000000\.tar.*written under another name"):
        batches(secret, OPTIONS)
    shards[0].write_bytes(first)
    manifest = next(path for path in secret.iterdir() if path not in shards)
    shutil.copy(shards[1], manifest)
    with pytest.raises(DecryptionError, match="written under another name"):
        batches(secret, OPTIONS)


@pytest.mark.slow
def test_a_changed_shard_is_quarantined_and_verify_names_it(tmp_path: Path) -> None:
    _, secret = pack_both(tmp_path, "tar")
    shard = sorted(secret.glob("shard-*"))[1]
    data, before = bytearray(shard.read_bytes()), shard.stat()
    data[len(data) // 2] ^= 1
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that the manifest is believed
    result = verify(secret, storage_options=OPTIONS, progress=False)
    assert result.flaws
    assert all("shard-000001" in flaw.shard for flaw in result.flaws)
    with pytest.raises(DecryptionError, match=r"shard-000001\.tar.* are not what was encrypted"):
        batches(secret, OPTIONS)
    with pytest.warns(BadChunkWarning, match=r"are not what was encrypted.* samples are replaced"):
        assert len(batches(secret, OPTIONS, max_bad_chunks=4)) == 10


def run(*arguments: object) -> str:
    """What a command prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_command([str(argument) for argument in arguments]) == 0
    return out.getvalue()


@pytest.mark.slow
def test_the_commands_pack_index_inspect_verify_with_the_environments_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEY", KEY.hex())
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(json.dumps({"txt": sample["txt"], "n": sample["n"]}) + "\n" for sample in samples()))
    target, option = tmp_path / "secret", ("--storage-option", "encryption_key=env")
    run("pack", source, target, "--format", "parquet", "--encrypt", "--json")
    (target / f"{MANIFEST_NAME}.penc").unlink()
    run("index", target, *option, "--json")
    assert json.loads(run("inspect", target, *option, "--json"))["samples"] == 40
    assert SECRET_TEXT in run("inspect", target, "--sample", 7, *option)
    assert json.loads(run("verify", target, *option, "--json"))["flaws"] == []
    assert all(path.name.endswith(".penc") for path in target.iterdir())
    loaded = batches(target, {"encryption_key": "env"}, columns=["txt"])
    assert np.concatenate([batch["__id__"] for batch in loaded]).size == 40
