"""Mixtures of three small sources that drop samples."""

from __future__ import annotations

from typing import Any

from penstock.loader import (
    Keep,
)

SIZES = {"a": 61, "b": 150, "c": 40}
ODD = Keep(["n"], lambda columns: columns["n"] % 2 == 1)
OPTIONS: dict[str, Any] = {"lanes": 8, "window": 2, "piece": 0}
