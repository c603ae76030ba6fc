"""Faults of one answer of a server. Values alone; `devtools.faults.proxy` acts on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The fault of one answer. It begins ``after_bytes`` into the body; what comes before is the server's own."""

    after_bytes: int = 0

    def __post_init__(self) -> None:
        if self.after_bytes < 0:
            raise ValueError(f"{self}: after_bytes may not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drip(Fault):
    """The body comes at ``bytes_per_s``, a little every tenth of a second."""

    bytes_per_s: float = 1000.0

    def __post_init__(self) -> None:
        if self.after_bytes < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"{self}: needs after_bytes >= 0 and bytes_per_s > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence(Fault):
    """Head and some of the body come, then nothing, and the connection stays open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlackHole(Fault):
    """The request is taken and never answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset(Fault):
    """The connection is reset (RST)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncate(Fault):
    """The connection is closed in good order, before the length that the head promised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrupt(Fault):
    """All bytes from ``after_bytes`` on are wrong; the length is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay(Fault):
    """The answer comes ``seconds`` late."""

    seconds: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Fault):
    """The proxy answers itself: a status, a redirect, a page; the server hears nothing."""

    status: int = 503
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
