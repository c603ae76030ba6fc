"""Tables of Delta Lake, Iceberg and Hudi: folders of Parquet files of which a log says which count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import DatasetError

# What lies at the root of each, by Delta's PROTOCOL.md, Iceberg's table spec and Hudi's technical specification.
_LOGS = (
    ("Delta Lake", "_delta_log/", re.compile(r"\d+\.(json|checkpoint\..*)")),
    ("Iceberg", "metadata/", re.compile(r"[^/]*\.metadata\.json")),
    ("Hudi", ".hoodie/", re.compile(r"hoodie\.properties")),
)


def refuse_logged(url: str, keys: Iterable[str], shards: Sequence[str]) -> None:
    """Raise DatasetError where ``shards`` would be all files of such a table, among all ``keys`` below ``url``.

    Files of earlier versions stay until they are cleaned up: rows that were deleted would be read, and changed ones
    twice.
    """
    for key in keys:
        for name, folder, log in _LOGS:
            if folder not in key:
                continue
            root, _, base = key.rpartition(folder)
            is_log = root[-1:] in ("", "/") and log.fullmatch(base) is not None
            if is_log and any(shard.startswith(root) for shard in shards):
                place = f"{url.rstrip('/')}/{root}"
                raise DatasetError(
                    f"{place}: is a table of {name}, whose log alone ({key}, ...) tells which of its files count; rows "
                    "that were deleted or changed would be read along. Give the files of the version that you want as "
                    "a list, or, where nothing was ever deleted or changed, all of them by the pattern "
                    f"{place}**/*.parquet"
                )
