"""What `penstock pack` says of errors: with its own options, those of what is read and those of what is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from called_commands import call

from penstock import pack
from penstock.cli import run
from penstock.cli.words import option_words
from penstock.loader import ConfigError, DatasetError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A data set of texts; beside it one of two formats, ``two``, raw tokens, ``tokens``, and ``numbers``, a file."""
    texts = [{"text": f"t{number}"} for number in range(20)]
    for number, kind in enumerate(("jsonl", "parquet")):
        pack(texts, tmp_path / kind, format=kind, progress=False)  # type: ignore[arg-type]
        (tmp_path / "two").mkdir(exist_ok=True)
        written = next((tmp_path / kind).glob(f"*.{kind}"))
        (tmp_path / "two" / f"{number}.{kind}").write_bytes(written.read_bytes())
    (tmp_path / "tokens").mkdir()
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "tokens" / "a.bin")
    (tmp_path / "numbers").write_bytes(b"12")
    return tmp_path / "jsonl"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{tmp}/two", "{tmp}/out"], "choose one with --source-format, or"),
        (["{tmp}/tokens", "{tmp}/out"], "give --source-seq-len 2048 if these are tokens, or --source-format files"),
        (["{tmp}/tokens", "{tmp}/out", "--source-seq-len", "-5"], "--source-seq-len -5: a sequence has at least"),
        (["{tmp}/tokens", "{tmp}/out", "--source-format", "token_documents"], "as in --source-eos 2"),
        (["{tmp}/jsonl", "{tmp}/out", "--source-storage-option", "word"], "--source-storage-option number 1 is not"),
        (["{tmp}/jsonl", "{tmp}/out", "--storage-option", "word"], "--storage-option number 1 is not"),
        (["{tmp}/jsonl", "{tmp}/out", "--seq-len", "8"], "--seq-len applies to --format tokens, not to --format tar"),
        (["{tmp}/jsonl", "{tmp}/out", "--dtype", "uint32"], "--dtype applies to --format tokens"),
        (["{tmp}/jsonl", "{tmp}/out", "--format", "tokens"], "--format tokens needs a sequence length: give --seq-len"),
        (["{tmp}/jsonl", "{tmp}/out", "--shard-mib", "inf"], "--shard-mib inf: must be"),
        (["{tmp}/jsonl", "{tmp}/out", "--shard-mib", "nan"], "--shard-mib nan: must be"),
        (["{tmp}/jsonl", "{tmp}/numbers"], "numbers is a file, not a folder"),
        (["{tmp}/jsonl", "{tmp}/numbers/in"], "numbers is a file, not a folder"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_errors_name_the_options_that_pack_has(
    words: list[str], told: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "pack", *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert not (tmp_path / "out").exists()


def test_errors_of_the_function_name_its_arguments(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"choose one with source_format='jsonl' \(--source-format\)"):
        pack(tmp_path / "two", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^seq_len= and field= apply to format='tokens', not to format='mds'"):
        pack(source, tmp_path / "out", format="mds", seq_len=2, field="x")


def test_what_is_encrypted_is_not_packed_as_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEY", "ab" * 32)
    sealed = tmp_path / "sealed"
    assert call(capsys, "pack", source, sealed, "--format", "parquet", "--encrypt")[0] == 0
    for more in ((), ("--source-format", "parquet")):
        code, _, err = call(capsys, "pack", sealed, tmp_path / "out", *more)
        assert (code, "is encrypted" in err) == (2, True), err
        assert "give --source-storage-option encryption_key=env" in err
    assert run(["pack", str(sealed), str(tmp_path / "out"), "--source-storage-option", "encryption_key=env"]) == 0
    code, _, err = call(capsys, "inspect", sealed, "--format", "parquet")
    assert (code, "give --storage-option encryption_key=env, with" in err) == (2, True), err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("or give storage_options={'anonymous': True} for public data", "or give --storage-option anonymous=true for"),
        ("give storage_options={'region': ...}", "give --storage-option region=..."),
        ("check storage_options= and the environment", "check --storage-option and the environment"),
        ("storage_options='user_agent' has", "--storage-option user_agent has"),
        ("check source_storage_options= and", "check --source-storage-option and"),
    ],
)
def test_options_of_a_store_are_told_as_the_command_line_takes_them(message: str, told: str) -> None:
    assert told in option_words(message, ("source_storage_option", "storage_option"))
