"""What commands say of errors, interrupts and odd names, and how they end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from called_commands import call
from started_process import started_process

from penstock import pack
from penstock.cli import run
from penstock.loader.dataset.manifest import MANIFEST_NAME


def run_process(arguments: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/nowhere"], "nowhere"),
        (["verify", "{tmp}"], "nothing there"),
        (["pack", "{tmp}", "{tmp}/out"], "nothing there"),
        (["pack", "{tmp}/none.jsonl", "{tmp}/out"], "no such file"),
        (["index", "gopher://x/y"], "gopher"),
        (["index", "{tmp}", "--storage-option", "secret-word"], "KEY=VALUE"),
        (["unknown"], "unknown command 'unknown'"),
        (["inspect", "{tmp}", "--field", "x"], "neither --sample nor --key is given"),
        (["inspect", "{tmp}", "--key", "x", "--sample", "1"], "--sample and --key are both given"),
        (["pack", "{tmp}", ""], "a target is a URL or a path, not ''"),
        (["export", "{tmp}", "--output", ""], "--output is empty; give a folder"),
        (["state", "show", "/dev/zero"], "/dev/zero: too large for a state"),
        (["export", "{tmp}", "--output", "x", "--step", "9" * 5000], "is none; give best, latest or a number"),
        (["export", "{tmp}", "--output", "x", "--max-shard-size", "9" * 400], "is no size; give one as 500MB"),
        (["export", "{tmp}", "--output", "x", "--max-shard-size", "0.1B"], "is no size; give one as 500MB"),
        (["plan", "--samples", "9" * 5000], "is no whole number"),
        (["plan", "--samples", "1e6", "--simulate", "--threads", "9" * 400], "must be a finite number"),
        (["plan", "--samples", ""], "--samples : is no whole number"),
        (["audit", "{tmp}/none"], "none: is not there; give the folder that was passed as audit_dir="),
        (["audit", "{tmp}/file"], "file: is a file; give the folder"),
        (["plan", "--samples", "1e6", "--world-size"], "--world-size without a number; give one or several"),
        (["plan", "--samples", "1e6", "--world-size", "--simulate"], "--world-size without a number"),
        (["plan", "--samples", "1e6", "--world-size", "8", "0"], "--world-size 0: must be at least 1"),
        (["plan", "--samples", "1e6", "--batch-size", "0"], "plan: --batch-size 0: must be at least 1"),
        (["plan", "{tmp}", "--shards", "3"], "--shards 3 without --samples: it is that of a hypothetical"),
        (["plan", "{tmp}", "--sample-bytes", "3", "--simulate"], "--sample-bytes 3 without --samples"),
        (["bench", "{tmp}", "--epochs", "0"], "--epochs 0: must be 1 or more"),
        (["bench", "{tmp}", "--seconds", "nan"], "--seconds nan: must be above 0"),
        (["bench", "{tmp}", "--step-ms", "nan"], "--step-ms nan: must be 0 or above"),
        (["bench", "{tmp}", "--out", "{tmp}"], "is a folder; give the file to write"),
        (["bench", "{tmp}", "--out", "{tmp}/file/x.json"], "its folder cannot be made"),
        (["bench", "--quick", "--seconds", "nan"], "--seconds nan: must be above 0"),
        (["bench", "--redraw", "x.json", "--results", "y", "--no-resume"], "leave out --results, --no-resume"),
        (["bench", "--quick", "--delay-ms", "inf"], "--delay-ms inf: must be 0 or above"),
        (["bench", "--quick", "--drop-slower", "nan"], "--drop-slower nan: must be above 1"),
        (["bench", "--quick", "--results", "{tmp}/file"], "file/field-quick.json: Not a directory"),
    ],
)
def test_errors_are_one_message_and_code_two(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if any("{tmp}/file" in argument for argument in arguments):
        (tmp_path / "file").write_text("no data")
    code, out, err = call(capsys, *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert "secret-word" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "URL", "--once"],
        ["report", "URL"],
        ["report", "{tmp}", "--output", "URL"],
        ["scale", "URL", "--workers", "2"],
        ["audit", "URL"],
        ["state", "show", "URL"],
        ["state", "skip", "URL", "--samples", "1"],
        ["verify", "{tmp}", "--quarantine", "URL"],
        ["bench", "{tmp}", "--out", "URL"],
        ["export", "{tmp}", "--output", "URL"],
    ],
)
def test_a_url_where_a_path_is_meant_is_refused_and_its_password_is_not_shown(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "time": 1.0, "step": 0}\n')
    url = "https://me:secret-word@host/x?token=secret-word"
    code, out, err = call(capsys, *(url if one == "URL" else one.replace("{tmp}", str(tmp_path)) for one in arguments))
    assert (code, out) == (2, "")
    assert "is a path on this machine, and a URL was given (https://...)" in err
    assert "secret-word" not in err
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_benchmark_whose_file_does_not_fit_is_shown_and_the_file_named(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import penstock.storage.files as files

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    code, out, err = call(capsys, "bench", shards, "--rounds", "1", "--no-startup", "--out", tmp_path / "b.json")
    assert "samples/s" in out
    assert (code, err) == (2, f"penstock bench: {tmp_path}/b.json: No space left on device\n")
    assert list(tmp_path.glob(".*")) == []


def test_the_export_of_a_run_over_a_parameter_server_says_what_writes_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "servers" / "manifests").mkdir(parents=True)
    for run_folder in (tmp_path, tmp_path / "checkpoints"):
        code, _, err = call(capsys, "export", run_folder, "--output", tmp_path / "out")
        assert code == 2
        assert "holds checkpoints of a parameter server" in err
        assert 'export = "model.safetensors" in [trainer]' in err


def test_a_wrong_option_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["index", "x", "--no-such-option"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_the_process_hands_on_exit_codes_and_survives_a_closed_pipe(shards: Path) -> None:
    assert run_process(["--version"]).stdout.startswith("penstock ")
    assert run_process([]).returncode == 2
    failed = run_process(["inspect", "/no/such/folder"])
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    for arguments in (f"inspect {shards} --json", f"inspect {shards}", f"verify {shards}", "--help", "plan --help"):
        piped = f"{sys.executable} -m penstock.cli {arguments} | true; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, ""), arguments


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["inspect {shards}", "inspect {shards} --json", "--version", "", "plan --help"])
def test_a_full_disk_under_the_output_is_an_error_in_words(arguments: str, shards: Path) -> None:
    command = f"{sys.executable} -m penstock.cli {arguments.replace('{shards}', str(shards))}"
    full = subprocess.run(["bash", "-c", command + " >/dev/full"], stderr=subprocess.PIPE, text=True, check=False)
    name = " ".join(["penstock", *arguments.split()[:1]]).removesuffix(" --version")
    assert (full.returncode, full.stderr) == (2, f"{name}: No space left on device\n")
    closed = subprocess.run(["bash", "-c", command + " >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0 if arguments else 2, "")


@pytest.mark.slow
def test_errors_that_cannot_be_told_still_are_code_two() -> None:
    command = f"{sys.executable} -m penstock.cli inspect /no/such/folder"
    for stderr in (">&-", "/dev/full"):
        ended = subprocess.run(["bash", "-c", f"{command} 2>{stderr}".replace("2>>&-", "2>&-")], check=False)
        assert ended.returncode == 2


_SLOW = """
import os, sys, time
sys.stdin.close()
from penstock.loader.formats.tar.format import TarFormat
read = TarFormat.index_shard
def slow(self, store, task):
    time.sleep(0.4)
    return read(self, store, task)
TarFormat.index_shard = slow
sys.argv = ["penstock", *sys.argv[1:]]
from penstock.cli import main
main()
"""


@pytest.mark.slow
def test_work_of_more_than_two_seconds_shows_a_bar_in_a_terminal(shards: Path) -> None:
    (shards / MANIFEST_NAME).unlink()
    reader, writer = pty.openpty()
    command = [sys.executable, "-c", _SLOW, "index", str(shards), "--no-write", "--threads", "1"]
    with started_process(command, stdout=subprocess.PIPE, stderr=writer) as process:
        out = process.communicate(timeout=60)[0]
    os.close(writer)
    drawn = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(reader)
    assert process.returncode == 0
    assert b"indexing" in drawn
    assert "200" in out


@pytest.mark.slow
def test_ctrl_c_ends_at_once_with_130_and_no_traceback(shards: Path) -> None:
    (shards / MANIFEST_NAME).unlink()
    slow = _SLOW.replace("time.sleep(0.4)", "os.write(1, b'begun\\n'); time.sleep(600)")
    command = [sys.executable, "-c", slow, "index", str(shards)]
    with started_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "penstock index: interrupted"


def test_names_from_a_data_set_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    folder = tmp_path / "in"
    pack([{f"x{evil}": "v", "txt": evil}], folder, format="parquet", progress=False)
    code, out, _ = call(capsys, "inspect", folder)
    assert (code, "\\x1b]0;owned\\x07" in out) == (0, True)
    shard = folder / "shard-000000.parquet"
    renamed = folder / f"a{evil}.parquet"
    shard.rename(renamed)
    (folder / MANIFEST_NAME).unlink()
    renamed.write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    code, listed, told = call(capsys, "verify", folder)
    assert (code, "owned" in listed) == (1, True)
    _, _, failed = call(capsys, "inspect", renamed)
    assert "owned" in failed
    for text in (out, listed, told, failed):
        assert not set(text) & set("\x1b\x07\u202e")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.csv", "penstock pack {tmp}/in/a.csv {tmp}/in/a-shards --format parquet"),
        ("", "penstock pack {tmp}/in {tmp}/in-shards"),
    ],
)
def test_what_is_no_data_set_is_answered_with_the_command_that_makes_one(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for each in [name] if name else ["a.jpg", "b.jpg"]:
        (tmp_path / "in" / each).write_text("n\n1\n")
    for verb in ("inspect", "index", "verify", "plan"):
        code, _, err = call(capsys, verb, tmp_path / "in" / name)
        assert (code, command.replace("{tmp}", str(tmp_path)) in err) == (2, True), err
    words = command.replace("{tmp}", str(tmp_path)).split()[1:]
    assert call(capsys, *words)[0] == 0
    assert call(capsys, "inspect", words[2])[0] == 0


def test_brackets_in_names_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no path is so long that it breaks in a bracket
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("see [bold] and [/red]")
    target = tmp_path / "out[red]"
    assert call(capsys, "pack", tmp_path / "in", target)[0] == 0
    out = call(capsys, "inspect", target)[1].replace("\n", "")
    assert "see [bold] and [/red]" in out
    assert "[red]" in out


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_a_sign_shows_a_question_mark(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = run_process(["plan", "--samples", "1e6"], env=environment, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"lanes {'?' if encoding == 'ascii' else chr(0xD7)} window" in done.stdout
