"""What is run by hand as ``python -m penstock.benchmarks.NAME`` says so when it is asked, and does nothing else."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import penstock.benchmarks
from penstock.benchmarks.arguments import describe

ROOT = Path(penstock.benchmarks.__file__).parent
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in ROOT.rglob("*.py")
    if re.search(r"from \.+arguments import .*\b(parse_config|make_parser)\b", path.read_text())
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"penstock.benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m penstock.benchmarks.{name} ")


def test_paragraphs_are_wrapped_and_commands_are_not() -> None:
    command = f"python -m penstock {'x' * 90}"
    told = describe(f"Some ``words``\n{'long ' * 40}\n\n{command}\n", 80).split("\n\n")
    assert all(len(line) <= 80 for line in told[0].splitlines())
    assert told[0].startswith("Some `words` long ")
    assert told[1] == command
