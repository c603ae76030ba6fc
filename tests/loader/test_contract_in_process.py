"""Promises of every loader, kept by one whose pipeline runs in a process of its own: tests of others, run once more."""

from __future__ import annotations

from typing import Any

import pytest
from test_data_loader import (
    tars,
    test_a_state_from_an_epochs_end_continues_with_the_next_epoch,
    test_an_epoch_is_every_sample_once_and_its_fields_belong_together,
    test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch,
    test_set_shares_changes_who_gets_a_sample_and_no_global_batch,
    test_steps_left_are_counted_from_the_last_batch,
    test_the_next_pass_is_the_next_epoch_in_another_order,
)

from penstock import DistributedDataLoader

__all__ = [
    "tars",
    "test_a_state_from_an_epochs_end_continues_with_the_next_epoch",
    "test_an_epoch_is_every_sample_once_and_its_fields_belong_together",
    "test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch",
    "test_set_shares_changes_who_gets_a_sample_and_no_global_batch",
    "test_steps_left_are_counted_from_the_last_batch",
    "test_the_next_pass_is_the_next_epoch_in_another_order",
]
pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    init = DistributedDataLoader.__init__

    def made(self: DistributedDataLoader[Any], *args: Any, **options: Any) -> None:
        init(self, *args, **{"place": "process"} | options)

    monkeypatch.setattr(DistributedDataLoader, "__init__", made)
