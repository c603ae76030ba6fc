"""Translates obstore's exceptions to ours, without credentials: what happened, where, and what to do."""

from __future__ import annotations

import re
from urllib.error import URLError

from obstore import exceptions as foreign

from ..checks import past_the_end, where
from ..errors import (
    AccessDeniedError,
    NoCredentialsError,
    NotFoundError,
    ObjectChangedError,
    StorageError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreUnreachableError,
    ThrottledError,
    UnsupportedURLError,
)
from ..options import known_options
from ..store import ByteRange
from ..suggestions import did_you_mean

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_QUERY = re.compile(r"(https?://[^\s?\"'<>]*)\?[^\s\"'<>,)]*")
_SIGNED = re.compile(
    r"(?i)\b(x-amz-[a-z-]+|x-goog-[a-z-]+|signature|sig|token|access_?key(?:_?id)?|awsaccesskeyid)=[^&\s\"'<>,)]+"
)
# Headers, in what a server says of a request that it got.
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|cookie|x-(?:amz|goog|ms)-[\w-]*|[\w-]{0,40}(?:token|secret|password|api-?key|signature)[\w-]{0,40})"
    r"(\s*:\s*)(?:(?:bearer|basic|aws4-hmac-sha256|sharedkey)\s+)?[^\s<>\"']+(?:,\s*\w+=[^\s<>\"']+)*"
)
_USERINFO = re.compile(r"(https?://)[^/\s@]+@")
_UNKNOWN_OPTION = re.compile(r"Configuration key: '([^']{1,100})' is not valid")
# What a credential provider in Python raised, with its class.
_PROVIDER = re.compile(r"External \w+ credential provider: (?:\w+: )?(.*)")
_PASSING_CODES = frozenset({"RequestTimeout", "OperationAborted"})
_METADATA = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google")
_THROTTLE_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy"})
# In the dump of obstore's errors.
_UNREACHABLE = re.compile(r"kind: Connect\b|\bdns error\b")
_TIMEOUT = re.compile(r"kind: Timeout\b|\bTimedOut\b")
_OS_REASON = re.compile(r"(?:message|error): \"([^\"]+)\"")
_LONGEST = 300
_LONGEST_READ = 4000  # of a line, before secrets are taken out of it; a server may send megabytes


class Translator:
    """Translates for one root; holds the root's URL and the secrets that messages must not show."""

    def __init__(self, url: str, secrets: frozenset[str]) -> None:
        self._url = url
        self._secrets = sorted(secrets, key=len, reverse=True)

    def cause(self, exc: BaseException) -> BaseException | None:
        """Choose the exception to raise from: the given one, unless its text holds a secret or a server's words."""
        text = str(exc)
        return exc if not _STATUS.search(text) and self._scrub(text) == text else None

    def translate_opening(self, exc: BaseException) -> StorageError:
        """Translate an error of obstore's constructors: an unknown option, or an invalid value."""
        unknown = _UNKNOWN_OPTION.search(str(exc))
        if unknown:
            scheme = self._url.partition("://")[0]
            meant = did_you_mean(unknown[1], known_options(scheme)) or "; docs/storage.md lists those that there are"
            return UnsupportedURLError(
                f"{self._url}: storage_options={{{unknown[1]!r}: ...}}: {scheme}:// has no such option{meant}"
            )
        return UnsupportedURLError(
            f"{self._url} can't be opened: {self._line(exc)}; check the URL and storage_options="
        )

    def translate(
        self, exc: BaseException, key: str, byte_range: ByteRange | None = None, *, listing: bool = False
    ) -> StorageError:
        """Translate an error of a request or a listing."""
        text, line = str(exc), self._line(exc)
        found = _STATUS.search(text)
        status = int(found.group(1)) if found else None
        found = _CODE.search(text)
        code = found.group(1) if found else ""
        name = where(self._url, key, byte_range)
        said = f" ({' '.join(str(part) for part in (status, code) if part)})" if status else f": {line}"
        refused = _PROVIDER.search(line)
        if refused:
            return NoCredentialsError(f"{name}: {refused[1]}")
        if _METADATA.search(text):
            return NoCredentialsError(
                f"{name}: no credentials found; set them in the environment or in storage_options=, "
                "or give storage_options={'anonymous': True} for public data"
            )
        if status in {408, 425} or code in _PASSING_CODES:
            return StoreUnavailableError(f"{name}: the store gave the request up{said}")
        if status in {429, 503} or code in _THROTTLE_CODES:
            return ThrottledError(f"{name}: the store asks for fewer requests{said}")
        if code == "NoSuchBucket" or (status == 404 and listing):
            return NotFoundError(f"{name}: there is no such bucket or folder{said}; check the URL's first part")
        if status == 404 or isinstance(exc, (foreign.NotFoundError, FileNotFoundError)):
            return NotFoundError(f"there is no object {name}{said}; check bucket and key")
        if status == 412 or isinstance(exc, foreign.PreconditionError):
            return ObjectChangedError(
                f"{name} has changed since it was listed or indexed{said}; "
                "list or index the data again, and do not write to it while it is read"
            )
        if status == 416 and byte_range is not None:
            return past_the_end(self._url, key, byte_range, None)
        if status in {401, 403, 407} or isinstance(exc, (foreign.PermissionDeniedError, foreign.UnauthenticatedError)):
            return AccessDeniedError(f"{name}: access denied{said}; {_cure_access(code)}")
        if status in {301, 307, 308} or "PermanentRedirect" in text:
            return StorageError(
                f"{name}: the bucket is in another region{said}; give storage_options={{'region': ...}}"
            )
        if isinstance(exc, foreign.NotSupportedError) or "does not support" in text.lower():
            return StorageError(
                f"{name}: the server can't do this: {line}; copy the data to a server that answers ranges"
            )
        if status in {400, 405, 409, 411, 413, 414, 501}:
            return StorageError(f"{name}: the server refuses the request{said}: {line}")
        if status is not None and status >= 500:
            return StoreUnavailableError(f"{name}: the store failed{said}")
        if isinstance(exc, (foreign.GenericError, OSError, foreign.JoinError)) and status is None:
            reason = exc.reason if isinstance(exc, URLError) else None
            if _UNREACHABLE.search(text) or isinstance(reason, OSError):
                found = _OS_REASON.search(text)
                why = self._scrub(str(reason) if reason is not None else found.group(1) if found else line)
                return StoreUnreachableError(f"{name}: no connection to the host could be made: {why}")
            if _TIMEOUT.search(text) or isinstance(exc, TimeoutError):
                return StoreTimeoutError(f"{name}: the response was too slow, or stopped")
            return StoreUnavailableError(f"{name}: the store can't be reached, or the connection broke: {line}")
        return StorageError(f"{name}: {line}")

    def _line(self, exc: BaseException) -> str:
        """The first line of the message, scrubbed and shortened; obstore adds a dump of its internals below it."""
        line = self._scrub(str(exc).strip().partition("\n")[0][:_LONGEST_READ])
        return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."

    def _scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _SIGNED.sub(r"\1=***", _USERINFO.sub(r"\1***@", _QUERY.sub(r"\1?***", text)))
        return _HEADER.sub(r"\1\2***", text)


def _cure_access(code: str) -> str:
    if code in {"SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"}:
        return "the access key or secret is wrong: check storage_options= and the environment"
    if code in {"ExpiredToken", "RequestTimeTooSkewed"}:
        return "the token has expired or this machine's clock is wrong"
    return "check that these credentials may read this bucket"
