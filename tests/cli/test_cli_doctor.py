"""``penstock doctor`` as a command: its table, its exit code, real faults of a process, and ranks under torchrun."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torchrun
from called_commands import call
from made_machine import machine, space
from test_cli_golden import WIDTH, check_layout, compare

from penstock.cli.doctor import show_diagnosis
from penstock.cli.screen import Screen
from penstock.tools.doctor.checks import diagnose
from penstock.tools.doctor.facts import Library, StoreFacts

CPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_a_diagnosis_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    unwell = machine(
        open_files=128,
        tmp=space("/tmp", 0),
        shm=space("/dev/shm", 64 << 20),
        libraries=(Library(name="torch", found="2.4.1", least="2.11"),),
        store=StoreFacts(
            url="s3://bucket/train/", problem="s3://bucket/train at http://10.0.0.9:9000: no connection", skew_s=4000.0
        ),
    )
    show_diagnosis(Screen(width=WIDTH), diagnose(unwell), [("node-2", diagnose(machine(memory_bytes=1 << 30)))])
    out = capsys.readouterr().out
    check_layout(out)
    compare("doctor", out, exact=True)


def test_a_good_diagnosis_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_diagnosis(Screen(width=WIDTH), diagnose(machine()), [("node-2", diagnose(machine(ranks=None)))])
    out = capsys.readouterr().out
    check_layout(out)
    compare("doctor-well", out, exact=True)


def test_the_json_has_each_check_and_the_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capsys, "doctor", str(tmp_path), "--json")
    printed = json.loads(out)
    assert err == ""
    assert {"python", "cuda", "memory", "store", "clock"} <= {check["check"] for check in printed["checks"]}
    assert code == (1 if printed["result"] == "fail" else 0)


def test_a_missing_store_fails_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "doctor", str(tmp_path / "nowhere"))
    assert code == 1
    assert "nowhere" in out


def test_what_is_found_and_what_mends_it_are_told_in_the_words_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "doctor", "https://me:secret-word@host/x")
    assert code == 1
    assert "use --storage-option for credentials" in " ".join(out.split())
    assert "secret-word" not in out
    assert "_options=" not in out


def test_strictly_a_warning_fails_the_command_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machine(open_files=512)
    monkeypatch.setattr("penstock.cli.doctor.examine", lambda **_: facts)
    assert call(capsys, "doctor")[0] == 0
    assert call(capsys, "doctor", "--strict")[0] == 1


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "doctor", "--timeout-s", "0")
    assert code == 2
    assert "--timeout-s 0: must be more than 0 seconds" in err


@pytest.mark.slow
def test_a_low_limit_of_files_and_a_mismatched_library_fail_a_real_process(tmp_path: Path) -> None:
    folder = tmp_path / "numpy-1.21.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.21.0\n")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "doctor", "--json"],
        env=os.environ | CPU | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, most)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    failed = {check["check"]: check for check in json.loads(done.stdout)["checks"] if check["level"] == "fail"}
    assert {"open files", "numpy"} <= set(failed)
    assert failed["numpy"]["found"] == "1.21.0; at least 1.26 is needed"


@pytest.mark.slow
def test_ranks_under_torchrun_measure_their_network_and_one_of_them_prints(tmp_path: Path) -> None:
    script = tmp_path / "examine.py"
    script.write_text(
        "import sys\nfrom penstock.cli import run\nsys.exit(run(['doctor', '--json', '--timeout-s', '60']))"
    )
    done = torchrun.run_ranks(2, script)
    printed = json.loads(done.stdout)
    (network,) = [check for check in printed["checks"] if check["check"] == "network"]
    assert network["found"].startswith("2 ranks on 1 host by "), done.stderr
    assert printed["other_hosts"] == {}


@pytest.mark.slow
def test_a_rank_that_no_other_joins_says_so() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "doctor", "--json", "--timeout-s", "3"],
        env=os.environ | CPU | alone,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    (network,) = [check for check in json.loads(done.stdout)["checks"] if check["check"] == "network"]
    assert network["level"] == "fail"
    assert "rank 0" in network["found"]
