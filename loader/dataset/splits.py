"""Which split of a data set (train, validation, test) each shard belongs to, told by names as the layouts in use do.

The layouts: a folder per split; ``train-00000-of-00012.parquet``, as the Hugging Face Hub writes them, often below
``data/``; one file per split, ``train.jsonl``; and the ``dataset_dict.json`` of ``save_to_disk``. The Hub's own rules
are in https://huggingface.co/docs/datasets/repository_structure. Arithmetic on names; nothing is read here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...storage.suggestions import did_you_mean
from ..errors import ConfigError, DatasetError

Split = str | Sequence[str]

ALL = "all"
DICTIONARY_NAME = "dataset_dict.json"

# Words for one split; each is a name of its own where a data set has several of them.
_SYNONYMS = (
    frozenset({"train", "training"}),
    frozenset({"validation", "valid", "val", "dev"}),
    frozenset({"test", "testing", "eval", "evaluation"}),
)
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(word for words in _SYNONYMS for word in words))})(?![a-z])")
_FOLDER = re.compile(rf"(?:split=)?{_WORD.pattern}[\d_.-]*")  # train, train2017, split=train
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d+-of-\d+")


def name_splits(keys: Iterable[str], dictionaries: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """The split of each key whose name tells one.

    What decides, first to last: a folder that a dataset_dict.json lists; the hub's ``NAME-00000-of-00012``, where NAME
    has a word for a split, or a neighbour's has; the innermost folder called by such a word; a word in the file's name;
    a word in a folder's name. ``dictionaries``: from the folder of each dataset_dict.json ('' or 'a/') to its splits.
    """
    names: dict[str, str] = {}
    sharded: dict[str, str] = {}  # names as the hub writes them that have no word for a split
    known_folders: set[str] = set()
    for key in keys:
        folder, _, base = key.rpartition("/")
        listed = _listed(key, dictionaries or {})
        shard = _SHARDED.match(base)
        if listed is not None:
            names[key] = listed
        elif shard and _only_word(shard[1]):
            names[key] = shard[1]
            known_folders.add(folder)
        else:
            word = _by_words(folder, base)
            if word is not None:
                names[key] = word
            elif shard:
                sharded[key] = shard[1]
    names |= {key: name for key, name in sharded.items() if key.rpartition("/")[0] in known_folders}
    return names


def _listed(key: str, dictionaries: Mapping[str, Sequence[str]]) -> str | None:
    for folder, splits in dictionaries.items():
        name, slash, _ = key.removeprefix(folder).partition("/")
        if key.startswith(folder) and slash and name in splits:
            return name
    return None


def _by_words(folder: str, base: str) -> str | None:
    parts = reversed(folder.split("/"))
    return _folder_word(folder) or next((word for part in (base, *parts) if (word := _only_word(part))), None)


def _folder_word(folder: str) -> str | None:
    """The word of the innermost folder that is called by a split."""
    parts = reversed(folder.lower().split("/"))
    return next((found[1] for part in parts if (found := _FOLDER.fullmatch(part))), None)


def split_folder(key: str, name: str) -> str:
    """The innermost folder of ``key`` that is called by its split ('' or 'a/b/'): where the split's data set begins."""
    parts = key.split("/")[:-1]
    for count in range(len(parts), 0, -1):
        part = parts[count - 1]
        if part == name or _only_word(part) == name:
            return "/".join(parts[:count]) + "/"
    return ""


def find_split_folders(keys: Iterable[str]) -> list[str]:
    """The splits that have a folder of their own each; such a split is a data set by itself, with its own manifest."""
    names = name_splits(keys)
    folders: dict[str, set[str]] = {}
    for key, name in names.items():
        folders.setdefault(name, set()).add(split_folder(key, name))
    return sorted(name for name, found in folders.items() if len(found) == 1 and "" not in found)


def _only_word(name: str) -> str | None:
    """The word for a split in a name; None if it has none, or several."""
    words = set(_WORD.findall(name.lower()))
    return words.pop() if len(words) == 1 else None


def choose_splits(url: str, wanted: Split, names: Mapping[str, str], shards: int) -> list[str]:
    """The names of the wanted splits, as the data set writes them: 'validation' is also its 'val', if that is its only.

    Raises:
        DatasetError: there is no such split; lists those that there are.
        ConfigError: ``wanted`` is empty or names one twice.
    """
    asked = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, Sequence) else []
    if not asked or not all(isinstance(name, str) and name for name in asked):
        raise ConfigError(f"split={wanted!r}: must be the name of a split, several names, or 'all'")
    found = Counter(names.values())
    chosen = [_find(name, found) for name in asked]
    for name, match in zip(asked, chosen, strict=True):
        if match is None and not found:
            raise DatasetError(
                f"{url}: no split {name!r}, as the names of its {_count(shards)} tell no splits (train/..., "
                "train-00000-of-00012.parquet, train.jsonl); leave split= (--split) out, or name shards by a pattern"
            )
        if match is None:
            raise DatasetError(
                f"{url}: no split {name!r}; its splits are {_list(found)}{did_you_mean(name, [*found, ALL])}"
            )
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"split={wanted!r} names a split twice")
    return [name for name in chosen if name is not None]


def _find(name: str, found: Iterable[str]) -> str | None:
    if name in found:
        return name
    alike = next((words for words in _SYNONYMS if name.lower() in words), frozenset({name.lower()}))
    matches = [other for other in found if other.lower() in alike]
    return matches[0] if len(matches) == 1 else None


def refuse_mixed_splits(
    url: str, keys: Sequence[str], dictionaries: Mapping[str, Sequence[str]], *, unit: str = "shard"
) -> None:
    """Raise DatasetError if shards of several splits would be read as one data set; lists them and what to do."""
    _refuse_several(url, name_splits(keys, dictionaries), len(keys), unit)


def refuse_split_folders(url: str, keys: Sequence[str]) -> None:
    """Raise DatasetError if loose files lie in folders called by several splits; names of files tell nothing here."""
    names = {key: word for key in keys if (word := _folder_word(key.rpartition("/")[0])) is not None}
    _refuse_several(url, names, len(keys), "file")


def _refuse_several(url: str, names: Mapping[str, str], total: int, unit: str) -> None:
    found = Counter(names.values())
    if len(found) < 2:
        return
    first = max(found, key=lambda name: (name in _SYNONYMS[0], found[name]))
    rest = total - len(names)
    raise DatasetError(
        f"{url}: holds several splits: {_list(found, unit)}"
        + (f", and {_count(rest, unit)} of none" if rest else "")
        + ". "
        f"Choose with split={first!r} (--split {first}), or several by a list of names; read everything with "
        f"split={ALL!r}, or name the {unit}s by a pattern such as {url.rstrip('/')}/**"
    )


def _list(found: Mapping[str, int], unit: str = "shard") -> str:
    return ", ".join(f"{name} ({_count(found[name], unit)})" for name in sorted(found))


def _count(number: int, unit: str = "shard") -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"
