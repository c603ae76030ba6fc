"""All that runs as ``python -m devtools NAME``, or for the bench, teaches when it is asked, and does nothing else."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import devtools
import penstock.benchmarks
from devtools.__main__ import cases, main
from penstock.cli.words import describe

ROOMS = {"devtools": Path(devtools.__file__).parent, "penstock.benchmarks": Path(penstock.benchmarks.__file__).parent}
RUNNABLE = {
    ".".join((room, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__main__"): text
    for room, folder in ROOMS.items()
    for path in sorted(folder.rglob("*.py"))
    if "__main__" in (path.stem, *re.findall(r'^if __name__ == "(\w+)":$', text := path.read_text(), re.MULTILINE))
}
CHILDREN = [name for name, text in RUNNABLE.items() if "import take_arguments" in text]
SCRIPTS = [
    "devtools.mixture_peers",
    "devtools.single_pass",
    "devtools.single_start",
]  # run by Pythons without this package: they cannot share its parser


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Runs a module as a process would, in an empty folder that stays empty: exit code, and what it printed."""

    def run(name: str, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:  # anything else would be a traceback
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        assert not list(tmp_path.iterdir())
        return ended.value.code, *capfd.readouterr()

    return run


def test_all_that_runs_is_found() -> None:
    ours = {
        "devtools",
        *(f"devtools.{name}" for name in ("cost_balance", "faults", "faults.reader", "gpu", "single_pass")),
    }
    assert set(RUNNABLE) >= ours | {"penstock.benchmarks.harness.measure"}
    assert len(CHILDREN) >= 8


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "--help") for name in RUNNABLE if name not in CHILDREN),
        ("devtools.images", "-h"),
        ("devtools.fuzz", "-h"),
    ],
)
def test_help_names_the_command(name: str, option: str, run: Callable[..., tuple[object, str, str]]) -> None:
    code, told, warned = run(name, option)
    program = f"{name.rpartition('.')[2]}.py" if name in SCRIPTS else f"python -m {name.replace('.', ' ', 1)}"
    assert (code, warned) == (0, "")
    assert told.startswith(f"usage: {program} ")
    assert "Traceback" not in told


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", CHILDREN)
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--help", "a", "b", "c", "d"], ["a", "b"], []], ids=str)
def test_a_process_that_a_benchmark_starts_says_which(
    name: str, arguments: list[str], run: Callable[..., tuple[object, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_SIMULATED", raising=False)
    code, told, warned = run(name, *arguments)
    assert (code, told) == (2, "")
    found = re.fullmatch(
        r"This process is a part of `([\w. -]+)`, which starts it: run that command instead\.\n", warned
    )
    assert found, warned
    assert found[1] == "penstock bench" or found[1].removeprefix("python -m ").replace(" ", ".") in RUNNABLE


# What benchmarks start themselves with, and arguments behind it that are wrong or too few.
MODES = {
    "autotune": [
        ["--run"],
        ["--run", "tokens", "here", "1"],
        ["--run", "none", "here", "1", "{}"],
        ["--run", "tokens", "here", "soon", "{}"],
        ["--run", "tokens", "here", "1", "{"],
        ["--run", "tokens", "here", "1", "[]"],
    ],
    "indexing": [
        ["--rank-of"],
        ["--rank-of", "here", "0", "many", "there"],
        ["--rank-of", "here", "0", "1", "there"],
    ],
    "mixture": [
        ["--pass"],
        ["--pass", "two"],
        ["--pass", "none", "here", "one"],
        ["--pass", "rows", "here", "none"],
        ["--pass-two", "here"],
        ["--pass-two", "here", "some"],
    ],
    "leaks": [["--case"], ["--case", "forks"], ["--case", "none", "10"], ["--case", "forks", "ten"]],
}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("name", "arguments"), [(name, words) for name in MODES for words in MODES[name]], ids=str)
def test_a_mode_that_a_benchmark_starts_itself_in_says_which_command_to_run(
    name: str, arguments: list[str], run: Callable[..., tuple[object, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    code, told, warned = run(f"devtools.{name}", *arguments)
    assert (code, told) == (2, "")
    command = f"python -m devtools {name}"
    assert warned == f"This process is a part of `{command}`, which starts it: run that command instead.\n"


def test_paragraphs_are_wrapped_and_commands_are_not() -> None:
    command = f"python -m penstock {'x' * 90}"
    told = describe(f"Some ``words``\n{'long ' * 40}\n\n{command}\n", 80).split("\n\n")
    assert all(len(line) <= 80 for line in told[0].splitlines())
    assert told[0].startswith("Some `words` long ")
    assert told[1] == command


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_runner_lists_every_case_and_runs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = cases()
    assert set(listed) >= {"equality", "faults", "gpu", "resume"}
    assert all(listed.values())
    monkeypatch.setattr(sys, "argv", ["devtools"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in listed)
    monkeypatch.setattr(sys, "argv", ["devtools", "images", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("usage: python -m devtools images ")
    monkeypatch.setattr(sys, "argv", ["devtools", "equalty"])
    with pytest.raises(SystemExit, match="no case 'equalty'"):
        main()


@pytest.mark.slow
def test_help_shows_no_python_where_docstrings_are_stripped() -> None:
    command = [sys.executable, "-OO", "-m", "devtools.images", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("usage: python -m devtools images [-h] [OPTIONS]\n")
    assert "Config(" not in out
