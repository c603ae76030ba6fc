"""Promises of every loader, kept by one whose pipeline runs in a process of its own: tests of others, run once more.

``PENSTOCK_TEST_PLACE=process pytest tests/loader`` runs all of them so; see ``places.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from exempt_from_places import EXEMPT
from places import Nursery, pipelines_in
from test_bad_samples import (
    images,
    rows,
    test_a_chunk_that_cannot_be_read_is_counted_written_down_and_replaced,
    test_a_resume_in_mid_epoch_goes_on_with_the_same_batches,
    test_more_bad_samples_than_allowed_are_an_error_that_names_counts_and_reasons,
    test_the_audit_counts_what_was_replaced_and_nothing_as_missing,
    test_the_first_bad_sample_is_a_warning_that_names_it,
)
from test_data_loader import (
    tars,
    test_a_state_from_an_epochs_end_continues_with_the_next_epoch,
    test_an_epoch_is_every_sample_once_and_its_fields_belong_together,
    test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch,
    test_set_shares_changes_who_gets_a_sample_and_no_global_batch,
    test_steps_left_are_counted_from_the_last_batch,
    test_the_next_pass_is_the_next_epoch_in_another_order,
)

__all__ = [
    "images",
    "rows",
    "tars",
    "test_a_chunk_that_cannot_be_read_is_counted_written_down_and_replaced",
    "test_a_resume_in_mid_epoch_goes_on_with_the_same_batches",
    "test_a_state_from_an_epochs_end_continues_with_the_next_epoch",
    "test_an_epoch_is_every_sample_once_and_its_fields_belong_together",
    "test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch",
    "test_more_bad_samples_than_allowed_are_an_error_that_names_counts_and_reasons",
    "test_set_shares_changes_who_gets_a_sample_and_no_global_batch",
    "test_steps_left_are_counted_from_the_last_batch",
    "test_the_audit_counts_what_was_replaced_and_nothing_as_missing",
    "test_the_first_bad_sample_is_a_warning_that_names_it",
    "test_the_next_pass_is_the_next_epoch_in_another_order",
]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")]


@pytest.fixture(autouse=True)
def in_a_process(nursery: Nursery) -> Iterator[None]:
    with nursery.starting(), pipelines_in("process"):
        yield


def test_what_is_left_out_is_there() -> None:
    files = list(Path(__file__).parent.rglob("test_*.py"))
    names = {file.name for file in files}
    for file in files:
        names.update(re.findall(r"def (test_\w+)\(", file.read_text()))
    assert EXEMPT.keys() <= names
