"""The tests that say nothing about loaders whose pipelines run in processes of their own, by file or test, and why."""

from __future__ import annotations

_PATCHES = "patches parts that a process of its own has anew"

_NOTES = "a function notes what it sees, or is told, in this process"

EXEMPT: dict[str, str] = {
    "test_kept_layouts.py": _PATCHES,
    "test_passes.py::test_a_loader_closed_by_another_thread_while_its_pipeline_is_made_leaves_no_thread": _PATCHES,
    "test_passes.py::test_an_interrupt_while_a_batch_is_waited_for_loses_none": _PATCHES,
    "test_passes.py::test_a_pass_whose_pipeline_is_stopped_after_its_last_batch_ends_there": _PATCHES,
    "test_passes.py::test_a_pass_that_is_asked_while_it_is_asked_refuses_and_goes_on": "a function asks its own loader",
    "test_passes.py::test_a_pass_begun_again_closes_the_pipeline_of_the_one_before_it": "of threads of this process",
    "test_filter_fields.py::test_a_predicate_of_columns_sees_which_values_are_missing": _NOTES,
    "test_filter_refusals.py::test_a_transform_that_decides_otherwise_when_asked_again_is_found_out": _NOTES,
    "test_splits.py::test_a_data_set_of_the_hub_is_opened_by_split_and_glob": "the hub is made up in this process",
    "test_torch_habits.py::test_an_argument_that_nobody_has_is_pythons_own_error": "of the constructor that is wrapped",
}
