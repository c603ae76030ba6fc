"""Words in errors: the known word that was probably meant, and lists of names that are not too long."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

_CUTOFF = 0.6
_LEAST_BEGINNING = 3


def nearest(word: object, known: Iterable[object]) -> str | None:
    """The known word that is written most like ``word``, or the one that begins with it; None if none is like it."""
    folded = word.casefold() if isinstance(word, str) else ""
    by_letters = {name.casefold(): name for name in known if isinstance(name, str)}
    if not folded or word in by_letters.values():
        return None
    near = difflib.get_close_matches(folded, list(by_letters), n=1, cutoff=_CUTOFF)
    if not near and len(folded) >= _LEAST_BEGINNING:
        longer = [name for name in by_letters if name.startswith(folded)]
        near = longer if len(longer) == 1 else []
    return by_letters[near[0]] if near else None


def did_you_mean(words: object, known: Iterable[object]) -> str:
    """A question to append to an error about an unknown word, or a list of them; empty where nothing is like these."""
    names = list(known)
    given = [words] if isinstance(words, str) or not isinstance(words, Iterable) else list(words)
    near = dict.fromkeys(name for word in given if (name := nearest(word, names)) is not None)
    return f"; did you mean {' and '.join(map(repr, near))}?" if near else ""


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> str:
    """The message of an error about a value that is none of the choices: ``name='pd': must be 'drop' or 'pad'``."""
    return f"{name}={value!r}: {must_be(value, choices)}"


def must_be(value: object, choices: Iterable[object]) -> str:
    """The end of such a message."""
    known = list(choices)
    return f"must be {listed([repr(choice) for choice in known])}{did_you_mean(value, known)}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence names them: ``a, b or c``."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def list_some(words: Collection[object], most: int) -> str:
    """The first ``most`` words, and how many others there are: ``a, b, c and 12 more``."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return f"{', '.join(map(str, islice(words, most)))}{more}"
