from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from called_commands import call

from penstock import pack
from penstock.cli import COMMANDS, run
from penstock.cli.bench import _without_secrets
from penstock.loader.dataset.manifest import MANIFEST_NAME


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out, _ = call(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"example:  penstock {name} " in out
    assert "--json" in out


@pytest.mark.slow
def test_help_shows_no_python_where_docstrings_are_stripped() -> None:
    command = [sys.executable, "-OO", "-m", "penstock.cli", "audit", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("usage: penstock audit [-h] FOLDER [--json]\n\n\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}")
    assert "AuditArguments" not in out


def test_help_needs_no_torch_and_no_pyarrow() -> None:
    code = "import sys; from penstock.cli import run; run(['--help']); "
    code += "print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False False"


@pytest.mark.slow
def test_packing_indexing_inspecting_and_verifying_need_no_torch(words: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from penstock.cli import run
codes = [run(["pack", {str(words)!r}, {str(tmp_path / "out")!r}]), run(["index", {str(tmp_path / "out")!r}])]
codes += [run([name, {str(tmp_path / "out")!r}]) for name in ("inspect", "verify")]
print(codes, "torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[0, 0, 0, 0] False"


@pytest.mark.slow
def test_a_table_is_packed_inspected_and_verified(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = call_json(capsys, "inspect", shards)
    assert (code, seen["format"], seen["samples"]) == (0, "tar", 200)
    code, result = call_json(capsys, "verify", shards)
    assert (code, result["ok"], result["samples"], result["checksums"]) == (0, True, 200, True)


@pytest.mark.slow
def test_reports_for_people_fit_a_terminal(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("index", "inspect", "verify"):
        code, out, err = call(capsys, name, shards)
        assert (code, err) == (0, "")
        assert "200" in out
        assert max(len(line) for line in out.splitlines() if str(shards) not in line) <= 100


@pytest.mark.slow
def test_a_folder_of_splits_is_read_one_split_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 30), ("val", 5)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)))
    for name in ("index", "inspect", "verify", "plan", "bench"):
        code, out, err = call(capsys, name, tmp_path)
        assert (code, out) == (2, "")
        assert "train (1 shard), val (1 shard)" in err
        assert "--split train" in err
    for name in ("inspect", "verify"):
        for split, count in (("train", 30), ("val", 5), ("validation", 5), ("val,train", 35), ("all", 35)):
            code, told = call_json(capsys, name, tmp_path, "--split", split)
            assert (code, told["samples"]) == (0, count), (name, split)
    code, out, err = call(capsys, "index", tmp_path, "--split", "train")
    assert (code, "--split all" in err) == (2, True)
    code, told = call_json(capsys, "index", tmp_path, "--split", "all")
    assert (code, told["samples"], (tmp_path / MANIFEST_NAME).exists()) == (0, 35, True)
    assert (
        call_json(capsys, "plan", tmp_path, "--split", "val", "--batch-size", 1, "--world-size", 1)[1][0]["samples"]
        == 5
    )


def test_the_index_of_a_split_with_a_folder_of_its_own_lies_in_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.jsonl").write_text('{"n": 1}\n')
    code, told = call_json(capsys, "index", tmp_path, "--split", "train")
    assert (code, told["samples"]) == (0, 1)
    assert sorted(path.parent.name for path in tmp_path.rglob(MANIFEST_NAME)) == ["train"]
    code, out, _ = call(capsys, "index", tmp_path, "--split", "all")
    assert code == 0
    assert "loaders of one split read that folder's own index; make it with --split test" in " ".join(out.split())


@pytest.mark.slow
def test_inspect_shows_one_sample_by_id_or_key(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = call_json(capsys, "inspect", shards, "--sample", "-1")
    fields = {field["name"]: field["value"] for field in told["fields"]}
    assert (code, told["id"], fields["word"]) == (0, 199, "w199")
    key = fields["__key__"]
    assert call_json(capsys, "inspect", shards, "--key", key) == (0, told)
    code, out, err = call(capsys, "inspect", shards, "--key", key)
    assert (code, err) == (0, "")
    assert f"number {told['number']} of {told['shard']}" in out
    assert "w199" in out
    for wrong in (("--sample", 200), ("--key", "none"), ("--sample", 1, "--key", key), ("--field", "n")):
        code, out, err = call(capsys, "inspect", shards, *wrong)
        assert (code, out) == (2, ""), wrong
        assert err.startswith("penstock inspect: ")


@pytest.mark.slow
def test_a_sample_of_a_table_is_found_by_a_field_without_torch(words: Path) -> None:
    code = f"""
import sys
from penstock.cli import run
print(run(["inspect", {str(words)!r}, "--key", "w77", "--field", "word"]), "torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "number 77 of words.jsonl" in out
    assert out.splitlines()[-1] == "0 False"


def test_verify_ends_with_one_and_names_the_bad_shard(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = shards / "shard-000001.tar"
    data = bytearray(bad.read_bytes())
    data[512] ^= 1
    bad.write_bytes(data)
    code, out, _ = call(capsys, "verify", shards)
    assert code == 1
    assert "shard-000001.tar" in out
    assert "checksum" in out
    code, result = call_json(capsys, "verify", shards)
    assert (code, result["bad_shards"]) == (1, ["shard-000001.tar"])


@pytest.mark.slow
def test_index_writes_the_manifest_beside_the_data(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / MANIFEST_NAME).unlink()
    code, told = call_json(capsys, "index", shards, "--no-write")
    assert (code, told["written"], (shards / MANIFEST_NAME).exists()) == (0, None, False)
    code, told = call_json(capsys, "index", shards)
    assert (code, told["samples"], told["checksums"], (shards / MANIFEST_NAME).exists()) == (0, 200, True, True)
    assert call_json(capsys, "verify", shards)[1]["checksums"] is True


def test_index_mends_a_manifest_with_its_checksums_and_without_a_warning(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(shards / "shard-000000.tar", shards / "another.tar")
    code, _, err = call(capsys, "index", shards)
    assert (code, err) == (0, "")
    code, result = call_json(capsys, "verify", shards)
    assert (code, result["checksums"]) == (0, True)


def test_other_commands_warn_of_a_stale_manifest_in_one_line(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "shard-000000.tar").unlink()
    _, _, err = call(capsys, "inspect", shards)
    assert re.fullmatch(r"penstock: warning: the manifest beside .* 1 gone.*\n", err)


def test_some_shards_of_a_folder_get_no_manifest(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = sorted(shards.glob("*.tar"))[:2]
    code, _, err = call(capsys, "index", *some)
    assert code == 2
    assert "--no-write" in err
    assert call_json(capsys, "index", *some, "--no-write")[1]["shards"] == 2


def test_tokens_are_packed_with_a_tokenizer_of_the_current_folder(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tokenizer.py").write_text("def encode(text):\n    return list(text.encode())\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["pack", words, "tokens", "--format", "tokens", "--seq-len", 8, "--field", "word"]
    code, told = call_json(capsys, *arguments, "--tokenizer", "own_tokenizer:encode")
    assert (code, told["samples"]) == (0, sum(len(f"w{n}") for n in range(200)) // 8)
    for wrong in ("own_tokenizer", "no_such_module:x", "own_tokenizer:nothing", "os:sep"):
        code, _, err = call(capsys, *arguments, "--tokenizer", wrong, "--overwrite")
        assert (code, f"--tokenizer {wrong}" in err) == (2, True)


def test_raw_token_files_are_read_with_a_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(4000))
    code, _, err = call(capsys, "inspect", tmp_path)
    assert (code, "--seq-len" in err) == (2, True)
    assert call_json(capsys, "inspect", tmp_path, "--seq-len", 10)[1]["samples"] == 200
    assert call_json(capsys, "inspect", tmp_path, "--seq-len", 10, "--dtype", "uint32")[1]["samples"] == 100
    assert call(capsys, "inspect", tmp_path, "--seq-len", 10, "--format", "tar")[0] == 2


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder of one raw file of four documents that end with token 0, but for the last."""
    (tmp_path / "raw").mkdir()
    np.array([5, 6, 0, 7, 0, 8, 9, 9, 0, 1, 2], "<u2").tofile(tmp_path / "raw" / "a.bin")
    return tmp_path / "raw"


def test_documents_of_token_files_are_indexed_and_then_found(
    documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--format token_documents" in call(capsys, "index", documents)[2]
    assert "as in --eos 2" in call(capsys, "index", documents, "--format", "token_documents")[2]
    for name in ("inspect", "verify", "plan"):
        ranks = ["--world-size", 2, "--batch-size", 1] if name == "plan" else []
        assert call(capsys, name, documents, "--eos", 0, *ranks)[0] == 0
    code, told = call_json(capsys, "index", documents, "--eos", 0, "--dtype", "uint16")
    assert (code, told["format"], told["config"]["eos"], told["samples"]) == (0, "token_documents", 0, 4)
    assert call_json(capsys, "inspect", documents)[1]["samples"] == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--eos", 0, "--seq-len", 3], "--seq-len cuts token files into sequences"),
        (["--format", "token_documents", "--seq-len", 3], "--seq-len cuts token files into sequences"),
        (["--eos", 0, "--format", "tokens"], "--eos applies to --format token_documents, not to --format tokens"),
        (["--dtype", "uint16", "--format", "tar"], "--seq-len and --dtype apply to token files, not to --format tar"),
        (["--eos", -1], "--eos -1: token ids are whole numbers from 0 on"),
    ],
)
def test_options_of_token_files_that_contradict_are_refused(
    documents: Path, options: list[object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "inspect", documents, *options)
    assert (code, told in err) == (2, True), err


def test_documents_of_token_files_are_packed_one_a_sample(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--format", "jsonl", "--source-eos", 0)
    assert call(capsys, "pack", documents, tmp_path / "out", *options)[0] == 0
    lines = (tmp_path / "out" / "shard-000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [[5, 6, 0], [7, 0], [8, 9, 9, 0], [1, 2]]
    code, _, err = call(capsys, "pack", documents, tmp_path / "no", *options, "--source-format", "csv")
    assert (code, "--source-eos applies to --source-format token_documents" in err) == (2, True)
    code, _, err = call(capsys, "pack", documents, tmp_path / "no", "--source-dtype", "uint16")
    assert (code, "--source-seq-len" in err, "--source-eos" in err) == (2, True, True)
    code, _, err = call(capsys, "pack", documents, tmp_path / "no", "--source-format", "token_documents")
    assert (code, "as in --source-eos 2" in err) == (2, True), err


def test_bench_refuses_data_of_one_batch_and_keeps_no_password(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "few"
    pack(({"n": n} for n in range(20)), folder, format="parquet", progress=False)
    code, _, told = call(capsys, "bench", folder, "--batch-size", 32)
    assert code == 2
    assert "make one batch of 32" in told
    words = _without_secrets(["sftp://user:SECRET@host/data", "--storage-option", "key=SECRET"])
    assert "SECRET" not in " ".join(words)
    assert "sftp://host/data" in words
