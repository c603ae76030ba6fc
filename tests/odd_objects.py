"""Objects of an S3 server whose keys obstore refuses."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import obstore
from obstore.store import S3Store


def put_odd(options: Mapping[str, Any], bucket: str, folder: str, name: str) -> None:
    """Write ``FOLDER/NAME``, which obstore refuses as a key: as the name in a bucket whose URL ends in the folder."""
    client = S3Store(
        config={
            "bucket": bucket,
            "endpoint": f"{options['endpoint']}/{bucket}/{quote(folder)}",
            "virtual_hosted_style_request": True,
            "access_key_id": options["access_key"],
            "secret_access_key": options["secret_key"],
            "region": "us-east-1",
        },
        client_options={"allow_http": True},
    )
    url = obstore.sign(client, "PUT", name, timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(url, data=b"odd", method="PUT"), timeout=30).close()
