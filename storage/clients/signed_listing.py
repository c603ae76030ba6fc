"""Listings of S3 buckets by pages that obstore signs and penstock reads.

obstore gives a whole listing up at the first key that it cannot name, as ``train//a.tar``; here such keys are listed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode

import obstore

from ..options import is_true

SIGNED_FOR = timedelta(minutes=5)
_MOST_PAGES = 1_000_000
# obstore puts an object's key behind the URL that it signs, so a last parameter, which means nothing, takes it.
_LAST = "x-penstock"
_PROBE = "x"
_OBJECT = re.compile(r"<Contents>(.*?)</Contents>", re.DOTALL)
_FIELD = re.compile(r"<(Key|Size|ETag|LastModified)>([^<]*)</")
_TOKEN = re.compile(r"<NextContinuationToken>([^<]+)</")
_ENCODED = re.compile(r"<EncodingType>\s*url\s*</")


def list_pages(
    read: Callable[[str], bytes], sign: Callable[[Mapping[str, str]], str], folder: str
) -> Iterator[dict[str, Any]]:
    """Yield every object below a folder ('' or 'a/b/') as obstore describes one, without the markers of folders.

    ``read`` answers a GET of a URL, ``sign`` makes one of a query. Raises what these raise, and OSError where the
    answer is no listing.
    """
    query = {"list-type": "2", "encoding-type": "url", "prefix": folder}
    for _ in range(_MOST_PAGES):
        page = read(sign(query)).decode(errors="replace")
        if "<ListBucketResult" not in page:
            raise OSError("the server does not support listings with encoding-type=url")
        is_encoded = _ENCODED.search(page) is not None
        for entry in _OBJECT.findall(page):
            found = {name: html.unescape(value) for name, value in _FIELD.findall(entry)}
            path, size = found.get("Key", ""), int(found.get("Size", 0))
            if is_encoded:
                path = unquote_plus(path)
            if size or not path.endswith("/"):
                modified = datetime.fromisoformat(found["LastModified"]) if "LastModified" in found else None
                yield {"path": path, "size": size, "e_tag": found.get("ETag"), "last_modified": modified}
        token = _TOKEN.search(page)
        if token is None:
            return
        query["continuation-token"] = html.unescape(token[1])
    raise OSError("the server does not support listings: its pages have no end")


def sign_queries(
    open_client: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]
) -> Callable[[Mapping[str, str]], str]:
    """Make URLs of queries to a bucket, signed by obstore; unsigned where access is anonymous.

    ``open_client`` opens the bucket with obstore's options; obstore finds the credentials.
    """
    is_anonymous = is_true(config.get("skip_signature", False))
    if is_anonymous:  # what is signed tells the URL
        config = {**config, "skip_signature": False, "access_key_id": _PROBE, "secret_access_key": _PROBE}

    def sign(settings: Mapping[str, Any]) -> str:
        return str(obstore.sign(open_client(settings), "GET", _PROBE, SIGNED_FOR))

    bucket = sign(config).partition("?")[0].removesuffix("/" + _PROBE)
    is_paid = str(config.get("request_payer", "")).lower() in {"true", "requester"}

    def sign_query(query: Mapping[str, str]) -> str:
        asked = {**query, "x-amz-request-payer": "requester"} if is_paid else query
        url = f"{bucket}?{urlencode(asked, quote_via=quote, safe='')}"
        if is_anonymous:
            return url
        return sign({**config, "endpoint": f"{url}&{_LAST}=", "virtual_hosted_style_request": True})

    return sign_query
