"""The examples run as their first lines say, on the data that they make up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


TRIED = [
    ("images_from_s3.py", ["--epochs", "1"], "epoch 0: accuracy"),
    ("llm_tokens.py", ["--steps", "5"], "epoch 0, step 5: loss"),
    ("packed_text.py", ["--steps", "3"], "epoch 0, step 3: loss"),
    ("click_log.py", ["--epochs", "1"], "epoch 0: 200,000 rows, loss"),
]
SLOWEST = ("mixed_packed_text.py", ["--steps", "3"], "the audit is exact")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "arguments", "expected"), [*TRIED, pytest.param(*SLOWEST, marks=pytest.mark.full)])
def test_example_runs_without_data_of_ones_own(name: str, arguments: list[str], expected: str) -> None:
    if name == "images_from_s3.py":
        pytest.importorskip("simplejpeg", reason="install penstock[images]")
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's threads on busy cores mostly wait for each other
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stderr == ""


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {one[0] for one in (*TRIED, SLOWEST)}
