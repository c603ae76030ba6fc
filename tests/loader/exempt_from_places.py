"""The tests that say nothing about loaders whose pipelines run in processes of their own, by file or test, and why."""

from __future__ import annotations

EXEMPT: dict[str, str] = {}
