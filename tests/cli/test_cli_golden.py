"""What every command prints, at 80 columns, without colour, into a pipe: kept word for word, and looked at.

After a change that is meant: ``PENSTOCK_UPDATE_GOLDEN=1 pytest tests/cli/test_cli_golden.py``, and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock import DistributedDataLoader, pack
from penstock.benchmarks.harness.job import Measurement
from penstock.benchmarks.harness.ratios import summarize
from penstock.benchmarks.harness.report import print_result
from penstock.cli import COMMANDS, run
from penstock.trainer.__main__ import main as train

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 80
_VARIES = (
    (r"\b[\d.]+ (?:s|ms|us)\b", "TIME"),
    (r"TIME, [\d.,]+ [KMG]?i?B/s", "TIME, RATE"),
    (r"[\d.,]+ [KMG]?i?B/s", "RATE"),
    (r"\b[0-9a-f]{32}\b", "FINGERPRINT"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small data sets, which is the current one."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    samples = [
        {"__key__": f"{'ants' if n < 30 else 'bees'}/{n:03d}", "txt": "word " * int(rng.integers(1, 300)), "cls": n % 2}
        for n in range(60)
    ]
    pack(samples, "shards", shard_bytes=60_000, progress=False)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n, "word": f"w{n}"}) + "\n" for n in range(1000)))
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.jpg", "c.png"):
        (tmp_path / "photos" / name).write_bytes(b"\xff\xd8\xff" + name.encode())
    (tmp_path / "clicks.csv").write_text("n,day\n1,2024-01-01\n")
    return tmp_path


def damaged(place: Path) -> None:
    shard = place / "shards" / "shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[512] ^= 1
    shard.write_bytes(data)


def audited(place: Path) -> None:
    for world_size in (2, 1):
        for rank in range(world_size):
            with DistributedDataLoader(
                "shards", batch_size=5, rank=rank, world_size=world_size, lanes=16, audit_dir=place / "audit"
            ) as loader:
                for _ in loader:
                    pass


def nothing(place: Path) -> None:
    pass


CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "pack": (nothing, ["pack", "rows.jsonl", "out", "--format", "parquet"]),
    "pack-notes": (nothing, ["pack", "photos", "out"]),
    "pack-refused": (nothing, ["pack", "rows.jsonl", "out", "--format", "tokens", "--seq-len", "8"]),
    "pack-not-empty": (nothing, ["pack", "rows.jsonl", "shards"]),
    "index": (nothing, ["index", "shards"]),
    "inspect": (nothing, ["inspect", "shards"]),
    "inspect-rows": (nothing, ["inspect", "rows.jsonl"]),
    "inspect-csv": (nothing, ["inspect", "clicks.csv"]),
    "inspect-folder": (nothing, ["inspect", "photos"]),
    "verify": (nothing, ["verify", "shards"]),
    "verify-damaged": (damaged, ["verify", "shards"]),
    "plan": (nothing, ["plan", "shards", "--batch-size", "4"]),
    "plan-wide": (
        nothing,
        [
            "plan",
            "--samples",
            "12811",
            "--shards",
            "100",
            "--world-size",
            "1",
            "8",
            "64",
            "100",
            "256",
            "1024",
            "--last-batch",
            "pad",
        ],
    ),
    "audit": (audited, ["audit", "audit"]),
    "misspelt": (nothing, ["insepct", "shards"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_command_prints_what_it_printed_and_fits_80_columns(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, arguments = CASES[name]
    prepare(place)
    run(arguments)
    printed = capsys.readouterr()
    out = printed.out.replace(str(place), "/data")
    err = printed.err.replace(str(place), "/data")
    check_layout(out)
    compare(name, out + (f"--- stderr ---\n{err}" if err else ""))


def test_the_overview_has_a_line_for_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    run(["--help"])
    out = capsys.readouterr().out
    check_layout(out)
    compare("help", out)
    listed = out.partition("[ARGUMENTS]\n\n")[2].partition("\n\n")[0].splitlines()
    assert [line[2:].split()[0] for line in listed] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit):
        run([name, "--help"])
    out = capsys.readouterr().out
    check_layout(out)
    compare(f"help-{name}", words_of_help(out))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["", "gpt"])
def test_the_trainers_help_says_what_it_said(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit):
        train([*recipe.split(), "--help"])
    compare("-".join(["help-trainer", *recipe.split()]), words_of_help(capsys.readouterr().out), exact=True)


def words_of_help(text: str) -> str:
    """The words of a help page, a line for each option: versions of tyro draw and wrap differently around them."""
    plain = re.sub(r"[│╭╮╰╯─]+|-{5,}", " ", text)
    blocks = re.split(r"\n(?=\s*--?\w)|\n\s*\n", plain)
    return "\n".join(" ".join(block.split()) for block in blocks) + "\n"


def test_a_comparison_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        name: {
            kind: [measured(name, rate * factor) for factor in (0.9, 1.0, 1.2)]
            for kind in ("epoch", "fresh", "resumed")
        }
        for name, rate in (("penstock", 137_248.0), ("webdataset", 9_940.0), ("mosaicml-streaming", 20_500.0))
    }
    result: dict[str, Any] = {
        "data": {"url": "/data/train/", "samples": 42_351, "bytes": 498_900_000, "shards": 1, "format": "tar",
                 "fields": ["cls", "jpg"]},
        "machine": {"cores": 2, "cpu": "AMD EPYC 9R14 96-Core Processor"},
        "settings": {"batch_size": 64, "decode": "none", "rounds": 3},
        "refused": {"litdata": "it is not installed; pip install litdata"},
        "summary": summarize(runs),
    }  # fmt: skip
    print_result(result, Console(width=WIDTH, highlight=False))
    out = capsys.readouterr().out
    check_layout(out)
    assert "13.81x" in out
    compare("bench", out, exact=True)


def measured(name: str, rate: float) -> Measurement:
    return Measurement(
        contender=name, mode="epoch", samples=1000, payload_bytes=1, batches=10, seconds=1.0, samples_per_s=rate,
        mb_per_s=rate / 100, first_batch_s=2000 / rate, wait_p50_ms=0.017, wait_p99_ms=5.7, wait_share=0.5, cpu_s=0.01,
        peak_bytes=673 << 20, bottleneck="assemble" if name == "penstock" else None,
    )  # fmt: skip


def check_layout(text: str) -> None:
    """No colours, nothing cut; and no line is longer than the terminal but for one word that is as long."""
    assert "\x1b" not in text
    for line in text.splitlines():
        assert len(line.rstrip()) <= WIDTH or max(map(len, line.split())) > WIDTH - 30, line


def compare(name: str, text: str, *, exact: bool = False) -> None:
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if not exact:
        for pattern, word in _VARIES:
            text = re.sub(pattern, word, text)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
