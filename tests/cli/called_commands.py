"""Commands of penstock, called in this process."""

from __future__ import annotations

import pytest

from penstock.cli import run


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
