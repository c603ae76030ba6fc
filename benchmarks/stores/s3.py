"""The credentials of an S3 source as other libraries name them, and signed URLs for those that only speak HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

from ...loader.errors import ConfigError
from ...storage.options import configure

_SIGNED_FOR = timedelta(hours=12)


def is_s3(url: str) -> bool:
    return urlsplit(url).scheme in ("s3", "s3a")


def aws_environment(storage_options: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which boto3 reaches the same server with the same key."""
    config, _ = configure("s3", storage_options)
    names = {
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
        "region": "AWS_DEFAULT_REGION",
        "endpoint": "AWS_ENDPOINT_URL",
    }
    given = {words: os.environ[words] for words in names.values() if words in os.environ}
    return given | {words: str(config[name]) for name, words in names.items() if name in config}


def sign_urls(root: str, keys: list[str], storage_options: Mapping[str, str]) -> list[str]:
    """Signed HTTP URLs of the objects ``keys`` of ``root``, valid for half a day.

    Raises:
        ConfigError: ``root`` is not in S3.
    """
    import obstore
    from obstore.store import S3Store

    if not is_s3(root):
        raise ConfigError(f"{root}: peers read local folders and S3 only")
    parts = urlsplit(root)
    config, client = configure("s3", storage_options)
    store = S3Store(parts.netloc, config=cast(Any, config), client_options=cast(Any, client))
    prefix = parts.path.strip("/")
    paths = [f"{prefix}/{key}" if prefix else key for key in keys]
    return list(obstore.sign(store, "GET", paths, _SIGNED_FOR))
