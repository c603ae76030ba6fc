"""Each example is killed on two ranks and resumed on one, as its first lines say: every sample once an epoch."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import ranks_environment

EXAMPLES = Path(__file__).parents[3] / "examples" / "integrations"
WITHOUT_TORCHVISION = Path(__file__).with_name("without_torchvision.py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are the frameworks' own

# The framework, whether it starts ranks itself, and arguments on two ranks.
TRIED = {
    "lightning_fit.py": ("lightning", True, ["--ranks", "2"]),
    "fabric_loop.py": ("lightning", False, ["--ranks", "2"]),
    "accelerate_loop.py": ("accelerate", False, []),
    "hf_trainer.py": ("transformers", False, []),
    "torchdata_nodes.py": ("torchdata", False, []),
    "torchtitan_tokens.py": ("torchtitan", False, []),
    "ray_train.py": ("ray", True, ["--ranks", "2"]),
}
SLOWEST = (pytest.mark.full,)
OF_THEIR_OWN = {"transformers", "torchtitan", "ray"}  # resumed in a process of their own; the others in this one
NO_EXTRA = {"torchtitan": "its dependencies do not fit the others' here; pip install --no-deps torchtitan"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=SLOWEST if one != "torchdata_nodes.py" else ()) for one in TRIED]
)
def test_a_run_killed_on_two_ranks_is_resumed_on_one_to_the_sample(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    framework, starts_ranks, on_two = TRIED[name]
    if find_spec(framework) is None:
        pytest.skip(NO_EXTRA.get(framework, f"install penstock[{'ray' if framework == 'ray' else 'integrations'}]"))
    launcher = [] if starts_ranks else ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    program = (
        [str(WITHOUT_TORCHVISION), str(EXAMPLES / name)] if framework == "transformers" else [str(EXAMPLES / name)]
    )
    options = ["--folder", str(tmp_path)]
    killed = run([*launcher, *program, *options, *on_two, "--kill-at", "13"])
    assert killed.returncode != 0, "it was not killed"
    assert "SIGKILL" in killed.stderr or starts_ranks, killed.stderr
    assert {path.name for path in tmp_path.glob("attempt-*")} == {
        f"attempt-from-000-rank-{rank}.jsonl" for rank in (0, 1)
    }

    if framework in OF_THEIR_OWN:
        resumed = run([*program, *options])
        assert resumed.returncode == 0, resumed.stderr
        told = resumed.stdout
    else:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *options])
        run_here(EXAMPLES / name, monkeypatch)
        told = capfd.readouterr().out
    starts = Counter(path.name.split("-")[2] for path in tmp_path.glob("attempt-*"))
    assert starts["000"] == 2
    assert sum(starts.values()) == 3, "the second run did not resume"
    for epoch in range(2):
        assert f"epoch {epoch}: 480 of 480 samples trained on exactly once, 0 more often" in told


def run_here(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program in this process, which has imported its framework, and leave nothing of it behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(program.parent)
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.modules.pop("common", None)
        if "accelerate.state" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        gc.collect()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in ranks_environment().items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONWARNINGS": "default", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=180, check=False
    )


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"} == TRIED.keys()


MISSING = """
import sys
for name in ("lightning", "pytorch_lightning", "accelerate", "transformers", "torchdata", "torchtitan"):
    sys.modules[name] = None
import penstock.loader.integrations as integrations
print(len(dir(integrations)))
for name in dir(integrations):
    try:
        getattr(integrations, name)
    except ImportError as error:
        print(error)
"""


def test_a_framework_that_is_missing_is_named_when_its_adapter_is_used() -> None:
    done = run(["-c", MISSING])
    assert done.stdout.splitlines() == [
        "6",
        "AccelerateLoader needs accelerate; install penstock[integrations]",
        "LightningCallback needs lightning; install penstock[integrations]",
        "LoaderNode needs torchdata; install penstock[integrations]",
        "TorchtitanLoader needs torchtitan 0.3: pip install torchtitan",
        "TransformersCallback needs transformers; install penstock[integrations]",
    ], done.stderr
