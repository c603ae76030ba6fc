"""Transforms and decoders that worker processes can import."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np

Sample = dict[str, Any]


class OddError(Exception):
    """Can be pickled, but not made again from its pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def augment(sample: Sample, rng: np.random.Generator) -> Sample:
    number = int(sample["txt"])
    return {
        "number": number,
        "noise": rng.random(3),
        "bin": sample["bin"],
        "ragged": np.arange(number % 5),
        "nested": {"a": [number, None]},
    }


def make_tensors(sample: Sample) -> Sample:
    import torch

    number = int(sample["txt"])
    return {"full": torch.full((2, 3), number, dtype=torch.float32), "half": torch.ones(3, dtype=torch.bfloat16)}


def make_default_floats(sample: Sample) -> Sample:
    import torch

    return {"half": torch.tensor(int(sample["txt"]) / 2)}


def fail_at_seven(sample: Sample) -> Sample:
    if sample["txt"] == "7":
        raise LookupError("seven is not wanted")
    return sample


def fail_at_three_end_at_seven(sample: Sample) -> Any:
    if sample["txt"] == "3":
        raise LookupError("three is not wanted")
    return [sample] if sample["txt"] == "7" else sample


def keep(sample: Sample) -> Sample:
    return sample


def add_shapes(sample: Sample) -> Sample:
    return {"shape": np.array(sample["png"].shape)}


def fail_oddly(sample: Sample) -> Sample:
    raise OddError("this", "that")


def make_unsendable(sample: Sample) -> Sample:
    return {"lock": threading.Lock()} if sample["txt"] == "7" else sample


def return_a_list(sample: Sample) -> list[Sample]:
    return [sample]


def kill_at_hundred(sample: Sample) -> Sample:
    if sample["txt"] == "100":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def sleep_for_minutes(sample: Sample) -> Sample:
    time.sleep(300)
    return sample


def rest_a_moment(sample: Sample) -> Sample:
    time.sleep(0.01)
    return sample


def rest_and_name_the_process(sample: Sample) -> Sample:
    return rest_a_moment(sample) | {"process": os.getpid()}


def reverse_bytes(data: bytes) -> bytes:
    return data[::-1]


def drop_odd(sample: Sample) -> Sample | None:
    return None if int(sample["txt"]) % 2 else sample


def is_even(sample: Sample) -> bool:
    return int(sample["txt"]) % 2 == 0


def fail_on_sevens(sample: Sample) -> Sample:
    number = int(sample["cls"])
    if number % 7 == 0:
        raise ValueError(f"{number} is a multiple of 7")
    return sample


def fail_on_every_fifth(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["n"] if "n" in sample else sample["txt"])
    if number % 5 == 0:
        raise ValueError(f"sample {number} is one of every fifth")
    return sample


def exit_at_seven(sample: Sample) -> Sample:
    if sample["txt"] == "7":
        os._exit(3)
    return sample


def speak_at_seven(sample: Sample) -> Sample:
    if sample["txt"] == "7":
        print("seven is here")
        warnings.warn("seven needs care", UserWarning, stacklevel=1)
    return sample


def grow(sample: Sample) -> Sample:
    number = int(sample["txt"])
    return {"number": number, "values": np.full(100 + 200 * number, number)}


def grow_much(sample: Sample) -> Sample:
    number = int(sample["txt"])
    return {"number": number, "values": np.full(20_000 + 10_000 * number, number)}


def take_memory(sample: Sample) -> Sample:
    taken.append(np.ones(1 << 20))
    return sample


taken: list[Any] = []


def start_a_thread_and_leak(sample: Sample) -> Sample:
    taken.append(bytearray(1 << 16))
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return sample


class Samples(list[Sample]):
    """What a function of users' may make batches of: no tensors, and equal where their samples are."""
