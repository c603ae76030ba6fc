"""Parts of batches are worth a thread's while, and still spread over the threads where rows take long or wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.decoding.row_job import PROCESSES_LEAST_S, THREADS_LEAST_S, Pace


def paced(cpu_s: float, wall_s: float, threads: int, rows: int = 10) -> Pace:
    pace = Pace()
    for _ in range(50):
        pace.note(rows, rows * cpu_s, rows * wall_s, threads)
    return pace


def test_before_anything_is_known_each_thread_gets_two_parts() -> None:
    assert Pace().part_rows(64, 4, THREADS_LEAST_S) == 8
    assert Pace().part_rows(3, 16, THREADS_LEAST_S) == 1


def test_cheap_rows_are_done_together_however_long_threads_waited_for_one_another() -> None:
    assert paced(20e-6, 20e-6, 16).part_rows(64, 16, THREADS_LEAST_S) == 15
    assert paced(20e-6, 16 * 20e-6, 16).part_rows(64, 16, THREADS_LEAST_S) == 15
    assert paced(1e-6, 1e-6, 2).part_rows(64, 16, THREADS_LEAST_S) == 64
    assert paced(20e-6, 20e-6, 16).part_rows(64, 16, PROCESSES_LEAST_S) == 64


def test_rows_that_take_long_or_wait_for_something_else_are_spread() -> None:
    assert paced(800e-6, 900e-6, 16).part_rows(64, 16, THREADS_LEAST_S) == 2
    assert paced(20e-6, 10e-3, 16).part_rows(64, 16, THREADS_LEAST_S) == 2


def test_the_pace_follows_what_rows_take_now() -> None:
    pace = paced(20e-6, 20e-6, 4)
    for _ in range(30):
        pace.note(10, 10e-3, 10e-3, 4)
    assert pace.part_rows(64, 4, THREADS_LEAST_S) == 8


@given(
    count=st.integers(1, 5000),
    parts=st.integers(1, 200),
    cpu_s=st.floats(0, 10),
    wall_s=st.floats(0, 100),
    least_s=st.floats(1e-6, 1),
)
def test_parts_have_rows_and_no_more_than_there_are(
    count: int, parts: int, cpu_s: float, wall_s: float, least_s: float
) -> None:
    pace = Pace()
    pace.note(7, cpu_s, wall_s, parts)
    size = pace.part_rows(count, parts, least_s)
    assert -(-count // (2 * parts)) <= size <= count
