"""Hugging Face's own Trainer on the loader: a resume skips once and to the sample, or says why it cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launch import ranks_environment

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each run of ``transformers_cases`` did."""
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("install penstock[integrations]")
    program = Path(__file__).with_name("transformers_cases.py")
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("transformers"))]
    done = subprocess.run(command, env=ranks_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize(("kill_at", "batches_saved"), [(3, 10), (5, STEPS + 5), (6, 2 * STEPS)])
def test_a_resume_is_the_rest_of_an_unbroken_run(
    told: dict[str, dict[str, Any]], kill_at: int, batches_saved: int
) -> None:
    unbroken, killed, resumed = told["unbroken"], told[f"killed at {kill_at}"], told[f"resumed at {kill_at}"]
    assert len(unbroken["batches"]) == 3 * STEPS
    assert killed["batches"][:batches_saved] == unbroken["batches"][:batches_saved]
    assert resumed["batches"] == unbroken["batches"][batches_saved:]
    assert resumed["weights"] == unbroken["weights"], "bit for bit, with dropout and accumulation"
    assert resumed["epoch"] == unbroken["epoch"] == 3


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("bare loader", r"ConfigError: .* is a DistributedDataLoader; .*get_train_dataloader.*TorchLoader\(loader\)"),
        ("as its data set", r"TypeError: .*TorchLoader\(loader\).*get_train_dataloader.*train_dataset= away"),
        ("ignore_data_skip", r"ConfigError: .*ignore_data_skip=True.*leave it False"),
        ("another global batch", r"ConfigError: .*had 12 batches .* has 6 now, with a global batch of 20"),
        ("another seed", r"StateMismatchError: .*seed: 5 in the state, 6 here"),
        ("saved without the callback", r"ConfigError: .*holds no position of the loader"),
    ],
)
def test_what_cannot_be_continued_exactly_is_refused_before_a_batch(
    told: dict[str, dict[str, Any]], case: str, error: str
) -> None:
    assert re.search(error, told[case].get("error", "no error")), told[case]
    assert told[case]["batches"] == []


def test_an_evaluation_is_over_every_row_each_time(told: dict[str, dict[str, Any]]) -> None:
    first, second = told["evaluated"]["told"]
    assert first == second == pytest.approx(told["evaluated"]["loss"])


def test_metrics_get_a_mask_of_padding_and_an_evaluation_costs_training_nothing(
    told: dict[str, dict[str, Any]],
) -> None:
    padded, unbroken = told["evaluated with padding"], told["unbroken"]
    assert padded["counts"] == 2 * [[150, 120, 120]], "rows, samples among those that count, rows that count"
    assert padded["batches"] == unbroken["batches"][:4]


def test_batches_by_tokens_are_refused_as_each_epoch_has_its_own_number(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="install penstock[integrations]")
    from penstock import DistributedDataLoader, open_manifest, pack
    from penstock.loader import ConfigError, CostExpression, index_costs, write_costs
    from penstock.loader.integrations import TorchLoader, TransformersCallback

    pack([{"n": n} for n in range(50)], str(tmp_path), format="parquet", progress=False)
    manifest = open_manifest(str(tmp_path))
    expression = CostExpression.parse("tokens=n")
    write_costs(manifest, expression, index_costs(manifest, expression))
    with DistributedDataLoader(str(tmp_path), batch_tokens=200) as loader:
        told = {"train_dataloader": TorchLoader(loader)}
        with pytest.raises(ConfigError, match="batch_tokens= each epoch has a number of batches of its own"):
            TransformersCallback().on_train_begin(None, transformers.TrainerState(), None, **told)
