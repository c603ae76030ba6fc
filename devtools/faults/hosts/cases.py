"""Faults of hosts and of the network between them, under a job of torchrun that has a rank on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .scene import HostCase, Scene

_BATCHES = 8  # after which it befalls: in mid-epoch


def during(befalls: Callable[[Scene], None], *, place: str = "batch", count: int = _BATCHES) -> Callable[[Scene], None]:
    """Act once all ranks have arrived at a point; those that wait there then continue."""

    def play(scene: Scene) -> None:
        scene.wait_for(place, count)
        scene.mark()
        befalls(scene)
        scene.let_go()

    return play


def cut(host: int) -> Callable[[Scene], None]:
    return lambda scene: scene.hosts.cut(host)


def cut_one_way(source: int, target: int) -> Callable[[Scene], None]:
    return lambda scene: scene.hosts.cut_one_way(source, target)


def pause(seconds: float) -> Callable[[Scene], None]:
    def play(scene: Scene) -> None:
        scene.hosts.cut(1)
        scene.later(seconds, scene.hosts.mend)

    return play


def kill(host: int, *, is_silent: bool) -> Callable[[Scene], None]:
    """SIGKILL of all processes of a host; ``is_silent``: its kernel does not say so, as where the power fails."""

    def play(scene: Scene) -> None:
        if is_silent:
            scene.hosts.cut(host)
        scene.hosts.kill(host)

    return play


def spoil(*, delay_s: float, loss: float) -> Callable[[Scene], None]:
    return lambda scene: scene.hosts.set_weather(delay_s=delay_s, loss=loss)


_SILENT = r"rank 1 has sent no heartbeat for .* or its host, .*, is down or cut off"
_STORE = r"the key-value store at 10\.77\.0\.1:\d+ on rank 0's node has not answered .* cut off from this one"
_GONE = r"the key-value store at 10\.77\.0\.1:\d+ on rank 0's node (is gone|has not answered)"
_BOTH = {0: _SILENT, 1: _STORE}
_NAMED = "named"


def _ends(name: str, fault: str, befalls: Callable[[Scene], None], *, sees: str = _NAMED, **more: Any) -> HostCase:
    given: dict[str, Any] = {"says": _BOTH, "errors": ("StallError",), "error_s": 25.0, "timeout_s": 90.0, **more}
    return HostCase(name=name, fault=fault, sees=sees, befalls=befalls, **given)


def _passes(name: str, fault: str, befalls: Callable[[Scene], None], **more: Any) -> HostCase:
    return HostCase(name=name, fault=fault, befalls=befalls, **{"gap_s": 45.0, "timeout_s": 240.0, **more})


_ALONE: Mapping[str, Any] = {"trains": False}

HOST_CASES: list[HostCase] = [
    _ends("host-cut", "a host loses its link in mid-epoch", during(cut(1))),
    _ends("host-cut-zero3", "the same with `zero=3`", during(cut(1)), job={"zero": 3}),
    _ends("host-cut-first", "the first of 3 hosts, with the store, loses its link", during(cut(0)), count=3,
          says={0: r"rank [12] has sent no heartbeat", 1: _STORE, 2: _STORE}),
    _ends("host-cut-last", "the last of 3 hosts loses its link", during(cut(2)), count=3,
          says={0: r"rank 2 has sent no heartbeat", 1: r"rank 2 has sent no heartbeat", 2: _STORE}),
    _ends("host-deaf", "frames from host 0 to host 1 are lost", during(cut_one_way(0, 1))),
    _ends("host-mute", "frames from host 1 to host 0 are lost", during(cut_one_way(1, 0))),
    _ends("host-cut-save", "a host loses its link while a checkpoint is written", during(cut(1), count=6),
          job={"saves_much": True, "save_every": 1}),
    _ends("host-cut-evaluation", "a host loses its link in an evaluation", during(cut(1), place="evaluation", count=1),
          job={"evaluates": True, "waits_at": "evaluation"}),
    _ends("host-cut-epoch", "a host loses its link at an epoch's last step", during(cut(1), count=20)),
    _ends("host-cut-trainer", "the same before the trainer is made, with `open_world(timeout_s=20)`",
          during(cut(1), place="loader", count=1), job={"waits_at": "loader", "meet_timeout_s": 20.0},
          says={0: r"waited 20 s for the others to make a trainer \(not there: rank 1\)", 1: _STORE}, error_s=45.0,
          sees="rank 0 waits for it, and names rank 1"),
    _passes("host-pause-3", "the link is down for 3 s", during(pause(3)), gap_s=10.0),
    _passes("host-pause-10", "the link is down for 10 s, with `stall_timeout_s=30`", during(pause(10)),
            job={"stall_timeout_s": 30.0}, gap_s=25.0),
    _passes("host-pause-30", "the link is down for 30 s, with `stall_timeout_s=90`", during(pause(30)),
            job={"stall_timeout_s": 90.0}, gap_s=65.0),
    _ends("host-pause-long", "the link is down for 30 s, longer than `stall_timeout_s`", during(pause(30)),
          error_s=60.0),
    _passes("host-loss", "3% of frames are lost, the others are 75 ms late",
            during(spoil(delay_s=0.075, loss=0.03)), job={"stall_timeout_s": 60.0}),
    _ends("host-killed", "SIGKILL of a host's processes, torchrun's too", during(kill(1, is_silent=False)),
          says={0: r"rank 1 has sent no heartbeat"}, sees="named at once"),
    _ends("host-killed-first", "SIGKILL of the first host's processes", during(kill(0, is_silent=False)),
          says={1: _GONE}, sees="named at once: the store and rank 0's host"),
    _ends("host-power", "a host loses its power", during(kill(1, is_silent=True)),
          says={0: r"rank 1 has sent no heartbeat"}),
    _ends("host-power-first", "the first host loses its power", during(kill(0, is_silent=True)), says={1: _STORE}),
    _ends("host-cut-stream", "a host loses its link; a loader alone, which drops samples",
          during(cut(1)), job={**_ALONE, "drops": True}, errors=("RankStoppedError",), error_s=180.0, timeout_s=220.0,
          says={0: r"rank 1 stopped: Silence: it has shown no sign of life for 12\d s",
                1: r"for over 120 s: (its host|it is down)"},
          sees="named after two to three minutes"),
]  # fmt: skip
