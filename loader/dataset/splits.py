"""Assign each shard to a split (train, validation, test) by its name, as the common layouts do.

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
_YEAR = re.compile(r"(?:19|20)\d\d(?!\d)")
# What comes after a name: the format's ending, and that of a compression.
_ENDINGS = re.compile(r"(\.[A-Za-z]\w*)?(\.(gz|bz2|xz|zst|zstd|lz4))?$", re.IGNORECASE)
_COUNTED = frozenset({"split", "part", "shard", "chunk", "batch", "file", "of", "data", "set", "dataset"})
_SIZES = frozenset({"tiny", "mini", "small", "medium", "large", "full", "all", "subset", "sample", "toy", "debug"})
_SHARDED = re.compile(r"(\w+(?:\.\w+)*)-\d+-of-\d+")


def name_splits(keys: Iterable[str], dictionaries: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """The split of each key whose name tells one.

    What decides, first to last: a folder that a dataset_dict.json lists; the hub's ``NAME-00000-of-00012``, where NAME
    has a word for a split, or a neighbour's has; the innermost folder called by such a word; a word in the file's name;
    a word in a folder's name. ``dictionaries``: from the folder of each dataset_dict.json ('' or 'a/') to its splits.
    """
    names: dict[str, str] = {}
    variants = _Variants()
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
            word, depth = _by_words(folder, base)
            if word is not None:
                names[key] = word
                variants.add(key, word, depth)
            elif shard:
                sharded[key] = shard[1]
    names |= {key: name for key, name in sharded.items() if key.rpartition("/")[0] in known_folders}
    return names | variants.rename()


def _listed(key: str, dictionaries: Mapping[str, Sequence[str]]) -> str | None:
    for folder, splits in dictionaries.items():
        name, slash, _ = key.removeprefix(folder).partition("/")
        if key.startswith(folder) and slash and name in splits:
            return name
    return None


def _by_words(folder: str, base: str) -> tuple[str | None, int]:
    """The word that tells the split, and how many folders are above the part of the key that has it."""
    word, depth = _folder_word(folder)
    if word is not None:
        return word, depth
    folders = folder.split("/") if folder else []
    if word := _only_word(base):
        return word, len(folders)
    for depth in range(len(folders) - 1, -1, -1):
        if word := _only_word(folders[depth]):
            return word, depth
    return None, 0


class _Variants:
    """Finds what only seems to be one split: ``train2014`` and ``train2017``, ``train_small`` beside ``train``.

    Names are compared with others of the same place and word. Numbers count the parts of one split, and so do words
    (``train_wiki``, ``train_books``), but for a year at the word, for a size, and beside a name without further words.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
        self._numbered: set[tuple[str, str]] = set()  # places where digits at the word are no years
        self._known: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {}

    def add(self, key: str, word: str, depth: int) -> None:
        """``depth``: how many folders are above the part of the key that has the word."""
        parts = key.split("/", depth + 1)
        path = "/".join(parts[: depth + 1])
        if path not in self._known:
            name = _ENDINGS.sub("", parts[depth]) if len(parts) == depth + 1 else parts[depth]
            at = next(found.start() for found in _WORD.finditer(name.lower()) if found[1] == word)
            before, after = name[:at], name[at + len(word) :]
            group = "/".join(parts[:depth]), word
            year = _YEAR.match(after)
            if year is None and after[:1].isdigit():
                self._numbered.add(group)
            plain = "_".join([*_words(before), word, *_words(after)])
            dated = "_".join([*_words(before), word + (year[0] if year else ""), *_words(after)])
            self._known[path] = group, (plain, dated)
        group, variant = self._known[path]
        self._keys.setdefault(group, {}).setdefault(variant, []).append(key)

    def rename(self) -> dict[str, str]:
        """The keys of splits that have several variants, each with its own name."""
        renamed: dict[str, str] = {}
        for group, variants in self._keys.items():
            has_years = group not in self._numbered
            names = {variant: variant[int(has_years)] for variant in variants}
            found = set(names.values())
            is_several = len(found) > 1 and (
                group[1] in found
                or any(name != plain for (plain, _), name in names.items())
                or any(not _SIZES.isdisjoint(name.split("_")) for name in found)
            )
            if is_several:
                renamed.update((key, names[variant]) for variant, keys in variants.items() for key in keys)
        return renamed


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\W\d_]+", text) if word and word.lower() not in _COUNTED]


def _folder_word(folder: str) -> tuple[str | None, int]:
    """The word of the innermost folder that is called by a split, and how many folders are above that."""
    folders = folder.lower().split("/")
    for depth in range(len(folders) - 1, -1, -1):
        if found := _FOLDER.fullmatch(folders[depth]):
            return found[1], depth
    return None, 0


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


def name_siblings(path: str) -> list[str]:
    """The path with every other split's words in the place of its last word for a split; [] if it has none."""
    parts = path.split("/")
    for place in reversed(range(len(parts))):
        word = _only_word(parts[place])
        if word is None:
            continue
        at = parts[place].lower().index(word)
        head, written, tail = parts[place][:at], parts[place][at : at + len(word)], parts[place][at + len(word) :]
        others = sorted(other for words in _SYNONYMS if word not in words for other in words)
        spelled = [other.capitalize() if written[:1].isupper() else other for other in others]
        return ["/".join([*parts[:place], head + other + tail, *parts[place + 1 :]]) for other in spelled]
    return []


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
    names: dict[str, str] = {}
    variants = _Variants()
    for key in keys:
        word, depth = _folder_word(key.rpartition("/")[0])
        if word is not None:
            names[key] = word
            variants.add(key, word, depth)
    names |= variants.rename()
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
