"""Calls of actors: errors of ours travel as plain values, and those of Ray are translated here."""

from __future__ import annotations

from typing import Any

from ...storage.ray_cluster import import_ray
from ..errors import ServerError, ShardUnreachableError
from ..server.refused import Refused, raise_refused

__all__ = ["Refused", "find_actor", "wait_for"]


def wait_for(reply: Any, name: str, *, timeout_s: float) -> Any:
    """Wait for the reply of an actor, by its reference.

    Raises:
        ShardUnreachableError: none came, whether or not the call ran.
        TrainerError: the actor refused, by an error of this kind, or failed.
    """
    ray = import_ray()
    try:
        found = ray.get(reply, timeout=timeout_s)
    except ray.exceptions.RayTaskError as exc:
        raise ServerError(
            f"{name} failed: {exc.cause!r}; this is a mistake of the program, or its memory is full"
        ) from exc
    except ray.exceptions.RayError as exc:  # died, restarts, gave no answer in time, or its node went
        raise ShardUnreachableError(f"{name} gave no answer: {type(exc).__name__}") from exc
    return raise_refused(found)


def find_actor(name: str) -> Any:
    """The actor of this name in this run.

    Raises:
        ShardUnreachableError: there is none, or the cluster does not answer.
    """
    ray = import_ray()
    try:
        return ray.get_actor(name)
    except (ValueError, ray.exceptions.RayError) as exc:
        raise ShardUnreachableError(f"there is no actor {name!r} in this run") from exc
