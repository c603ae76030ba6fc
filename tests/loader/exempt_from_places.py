"""The tests that say nothing about loaders whose pipelines run in processes of their own, by file or test, and why."""

from __future__ import annotations

_PATCHES = "patches parts that a process of its own has anew"

_NOTES = "a function notes what it sees, or is told, in this process"

_LOOKS = "looks into the pipeline, or for its threads, files or mappings, in this process"

EXEMPT: dict[str, str] = {
    "test_image_processes.py": "of worker processes that this process starts",
    "test_interrupts.py": "interrupts lines and threads of this process; those of a loader beside one have their own",
    "test_kept_layouts.py": _PATCHES,
    "test_late_bytes.py": "of objects that the loop's own process makes",
    "test_loader_process.py": "says where its loaders run",
    "test_mapped_chunks.py": _LOOKS,
    "test_mapped_tokens.py": _LOOKS,
    "test_on_disk.py": _PATCHES,
    "test_processes.py": "of worker processes that this process starts",
    "test_close_in_mid_epoch_leaves_no_thread": _LOOKS,
    "test_a_loader_collected_in_a_thread_of_its_own_ends_all_of_them": _LOOKS,
    "test_a_loader_warns_once_of_an_older_manifest_however_it_reads": "once by each process that reads",
    "test_a_predicate_of_columns_sees_which_values_are_missing": _NOTES,
    "test_a_rank_that_falls_silent_stops_those_that_wait_for_their_batch_and_names_its_host": _LOOKS,
    "test_an_error_of_another_rank_is_raised_by_one_of_a_process_loaders": _LOOKS,
    "test_of_two_loaders_that_one_which_failed_elsewhere_is_stopped_alone": _LOOKS,
    "test_a_second_epoch_walks_no_headers": _PATCHES,
    "test_a_source_of_which_nothing_is_left_is_named_on_every_rank": _NOTES,
    "test_a_transform_draws_other_numbers_than_the_crop_and_the_flip": _NOTES,
    "test_a_transform_that_decides_otherwise_when_asked_again_is_found_out": _NOTES,
    "test_after_an_error_training_goes_on_from_the_same_position": _NOTES,
    "test_images_of_one_size_are_lent_memory_and_stay_while_they_are_kept": _LOOKS,
    "test_pages_that_are_kept_are_within_the_memory_limit": _LOOKS,
    "test_rows_of_a_mixture_are_copied_late_and_are_the_same_rows": _PATCHES,
    "test_what_a_users_function_returns_may_be_changed_later": _PATCHES,
    "test_one_job_copies_the_rows_of_several_batches_which_stay_apart": _PATCHES,
    "test_a_batch_whose_rows_are_being_copied_ends_with_the_loader": _PATCHES,
    "test_a_loader_that_another_thread_closes_while_a_pass_starts_says_so": _PATCHES,
    "test_a_loader_closed_by_another_thread_while_its_pipeline_is_made_leaves_no_thread": _PATCHES,
    "test_an_interrupt_while_a_batch_is_waited_for_loses_none": _PATCHES,
    "test_a_pass_whose_pipeline_is_stopped_after_its_last_batch_ends_there": _PATCHES,
    "test_a_pass_that_is_asked_while_it_is_asked_refuses_and_goes_on": "a function asks its own loader",
    "test_a_pass_begun_again_closes_the_pipeline_of_the_one_before_it": _LOOKS,
    "test_a_data_set_of_the_hub_is_opened_by_split_and_glob": "the hub is made up in this process",
    "test_subsets_on_the_hub_are_refused_alike": "the hub is made up in this process",
    "test_an_argument_that_nobody_has_is_pythons_own_error": "of the constructor that is wrapped",
}
