"""``storage_options``: one set of names for every cloud, translated to obstore's.

Friendly names: ``endpoint`` (or ``endpoint_url``), ``access_key`` (or ``key``), ``secret_key`` (or ``secret``),
``token``, ``region``, ``anonymous`` (or ``anon``), ``timeout_s``, ``connect_timeout_s``, and ``direct_reads``, which is
ours: False leaves all reads to obstore (see `penstock.storage.clients.direct`). Any other name is one of obstore's for
that cloud (``account_name``, ``service_account``, ``virtual_hosted_style_request``, ...) or of its HTTP client
(``allow_http``, ``proxy_url``, ``root_certificate``, ...). Missing values come from the environment (``AWS_*``,
``GOOGLE_*``, ``AZURE_*``), then for S3 from the shared credentials file, and finally from the machine's role.

Beside clouds, every store takes ``encryption_key`` (`penstock.storage.encryption.store`), and local files
``mapped_reads``: False has them read into memory, "views" has views of them handed out, too
(`penstock.storage.memory.mapped`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from .errors import UnsupportedURLError
from .suggestions import did_you_mean

if TYPE_CHECKING:
    from .retrying.adaptive_timeout import TimeLimit

CREDENTIALS_OPTION = "credential_provider"
DIRECT_OPTION = "direct_reads"
ENCRYPTION_OPTION = "encryption_key"
MAPPED_OPTION = "mapped_reads"

MappedReads = bool | Literal["views"]

_FRIENDLY = {
    "endpoint_url": "endpoint",
    "access_key": "access_key_id",
    "key": "access_key_id",
    "secret_key": "secret_access_key",
    "secret": "secret_access_key",
    "token": "session_token",
    "anonymous": "skip_signature",
    "anon": "skip_signature",
}
_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_headers",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
# obstore's names of what a cloud's store takes, which errors suggest; it takes them with a cloud's prefix, too.
_OF_CLOUD = {
    "s3": (
        "access_key_id", "bucket", "checksum_algorithm", "conditional_put", "container_authorization_token_file",
        "container_credentials_full_uri", "container_credentials_relative_uri", "copy_if_not_exists", "default_region",
        "disable_bulk_delete", "disable_tagging", "endpoint", "imdsv1_fallback", "metadata_endpoint", "region",
        "request_payer", "role_arn", "role_session_name", "s3_express", "secret_access_key", "server_side_encryption",
        "session_token", "skip_signature", "sse_bucket_key_enabled", "sse_customer_key_base64", "sse_kms_key_id",
        "endpoint_url_sts", "unsigned_payload", "virtual_hosted_style_request", "web_identity_token_file",
    ),
    "gs": (
        "application_credentials", "base_url", "bearer_token", "bucket", "service_account", "service_account_key",
        "skip_signature",
    ),
    "az": (
        "access_key", "account_key", "account_name", "authority_host", "client_id", "client_secret", "container_name",
        "disable_tagging", "endpoint", "fabric_cluster_identifier", "fabric_session_token", "fabric_token_service_url",
        "fabric_workload_host", "federated_token_file", "msi_endpoint", "msi_resource_id", "object_id", "sas_key",
        "skip_signature", "tenant_id", "token", "use_azure_cli", "use_emulator", "use_fabric_endpoint",
    ),
}  # fmt: skip
_OF_S3 = ("endpoint_url", "access_key", "key", "secret_key", "secret", "token")
_OF_PENSTOCK = (
    "anonymous", "anon", "timeout_s", "connect_timeout_s", CREDENTIALS_OPTION, DIRECT_OPTION, ENCRYPTION_OPTION
)  # fmt: skip
_SECRET_WORDS = (
    "secret",
    "token",
    "password",
    "account_key",
    "access_key",
    "sas",
    "credential",
    "service_account",
    "header",
)
_S3_IDENTITY = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI")  # fmt: skip

_CLOUD_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "HF_")

_DURATION = re.compile(r"(\d+)\s*([a-z]+)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_MAY_HAVE_LINES = re.compile("service_account|certificate|credentials")  # JSON and PEM
_S3_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_NO_HTTP = (
    "storage_options={'allow_http': False} refuses plain http, and the URL or its endpoint is http://; "
    "write https://, or leave the option out"
)
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0,
          "minutes": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "hours": 3600.0}  # fmt: skip

# Each thread has at most one request in flight, and an idle connection costs a socket; hosts run some 100 threads.
_CLIENT_DEFAULTS = {
    "pool_max_idle_per_host": "256",
    "pool_idle_timeout": "60s",
    "connect_timeout": "5s",
    "read_timeout": "30s",
    "timeout": "300s",
    "user_agent": "penstock",
}


def configure(scheme: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn ``storage_options`` into obstore's (store config, client options).

    Raises:
        UnsupportedURLError: an option is given under two names, or does not apply to a web server.
    """
    config: dict[str, Any] = {}
    client: dict[str, Any] = dict(_CLIENT_DEFAULTS)
    for name, value in options.items():
        if value is None or name == DIRECT_OPTION:
            continue
        if name in {"timeout_s", "connect_timeout_s"}:
            client[name.removesuffix("_s")] = f"{_milliseconds(name, value)}ms"
        elif name in _CLIENT:
            client[name] = value
        else:
            known = _FRIENDLY.get(name, name).removeprefix("aws_") if is_s3(scheme) else _FRIENDLY.get(name, name)
            if known in config:
                raise UnsupportedURLError(f"storage_options give {known} twice, once as {name!r}; give it once")
            config[known] = value
    _check_texts(config, client)
    if scheme in {"http", "https"}:
        if scheme == "http" and not is_true(client.get("allow_http", True)):
            raise UnsupportedURLError(_NO_HTTP)
        if config:
            meant = did_you_mean(config, known_options(scheme)) or "; leave them out"
            raise UnsupportedURLError(f"storage_options {sorted(config)} mean nothing to a web server{meant}")
        client.setdefault("allow_http", scheme == "http")
        return {}, client
    if is_s3(scheme):
        _refuse_controls((f"the environment's {name}", os.environ.get(name, "")) for name in _S3_SECRETS)
        _complete_s3(config)
    if "endpoint" in config:
        _check_endpoint(str(config["endpoint"]), client)
    return config, client


def _milliseconds(name: str, value: Any) -> int:
    try:
        found = math.ceil(float(value) * 1000)
    except (ValueError, TypeError, OverflowError):
        found = 0
    if found <= 0:
        raise UnsupportedURLError(f"storage_options={{{name!r}: {value!r}}}: give seconds, more than 0")
    return found


def known_options(scheme: str) -> list[str]:
    """The names that ``storage_options`` may have for URLs of a scheme, without obstore's rarer spellings."""
    if scheme in {"http", "https"}:
        return sorted({*_CLIENT, "timeout_s", "connect_timeout_s", DIRECT_OPTION, ENCRYPTION_OPTION})
    cloud = "s3" if is_s3(scheme) else "gs" if scheme.startswith("g") else "az"
    return sorted({*_CLIENT, *_OF_CLOUD[cloud], *_OF_PENSTOCK, *(_OF_S3 if cloud == "s3" else ())})


def is_true(value: Any) -> bool:
    """Return whether an option is on: a bool, or a word for one."""
    return str(value).strip().lower() in {"1", "true", "on", "yes", "y"}


def _check_endpoint(endpoint: str, client: dict[str, Any]) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UnsupportedURLError(
            "the endpoint is no URL; write it with its scheme, e.g. https://minio.example.org:9000 "
            "(storage_options, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL)"
        )
    if parts.query or parts.username is not None or parts.password is not None:
        raise UnsupportedURLError(
            f"the endpoint {parts.scheme}://{parts.hostname} carries credentials or a query; "
            "give credentials under their own names in storage_options="
        )
    if parts.scheme == "http" and not is_true(client.setdefault("allow_http", True)):
        raise UnsupportedURLError(_NO_HTTP)


def _check_texts(config: Mapping[str, Any], client: Mapping[str, Any]) -> None:
    """Refuse what no HTTP header can hold, as the line ends that come with secrets read from files."""
    texts = [(f"storage_options={name!r}", value) for name, value in config.items() if not _MAY_HAVE_LINES.search(name)]
    texts += [("storage_options='user_agent'", client["user_agent"])]
    headers = client.get("default_headers", {})
    if not isinstance(headers, Mapping):
        raise UnsupportedURLError("storage_options='default_headers' has to be a dict of names and values")
    texts += [("storage_options='default_headers'", item) for pair in headers.items() for item in pair]
    _refuse_controls(texts)


def _refuse_controls(texts: Iterable[tuple[str, Any]]) -> None:
    for where, value in texts:
        if any(_CONTROL.search(text) for text in _texts(value)):
            raise UnsupportedURLError(
                f"{where} holds a line end or another control character; strip what was read from a file"
            )


def limit_options(options: Mapping[str, Any], limit: TimeLimit) -> dict[str, Any]:
    """``storage_options`` with which requests break off past ``limit``, or past their own time where it is less."""
    total, idle = options.get("timeout_s", options.get("timeout")), options.get("read_timeout")
    total_s = limit.total_s if total is None else min(limit.total_s, seconds_of(total))
    idle_s = limit.idle_s if idle is None else min(limit.idle_s, seconds_of(idle))
    kept = {name: value for name, value in options.items() if name not in {"timeout", "timeout_s", "read_timeout"}}
    return {**kept, "timeout_s": total_s, "read_timeout": f"{idle_s * 1000:.0f}ms"}


def seconds_of(duration: Any) -> float:
    """The seconds of an option: a number, a timedelta, or obstore's words for a duration ("1500ms", "2h 37min").

    Raises:
        UnsupportedURLError: it is none of these.
    """
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        return float(duration)
    parts = _DURATION.findall(str(duration))
    if not parts or "".join(a + b for a, b in parts) != str(duration).replace(" ", ""):
        raise UnsupportedURLError(f"storage_options give {duration!r} as a time; write seconds, or e.g. '1500ms'")
    if any(unit not in _UNITS for _, unit in parts):
        raise UnsupportedURLError(f"storage_options give {duration!r} as a time; units are {', '.join(_UNITS)}")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def environment_secrets() -> dict[str, str]:
    """The variables of the environment that clients of clouds take credentials from."""
    return {name: value for name, value in os.environ.items() if name.upper().startswith(_CLOUD_VARIABLES)}


def find_secrets(*mappings: Mapping[str, Any]) -> frozenset[str]:
    """Collect the values that must not appear in any message."""
    return frozenset(
        text
        for mapping in mappings
        for name, value in mapping.items()
        if any(word in name.lower() for word in _SECRET_WORDS) or name == "key"
        for text in _texts(value)
        if len(text) >= 8  # a shorter value is no secret, and replacing it would garble messages
    )


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (str, bytes)):
        yield value.decode(errors="replace") if isinstance(value, bytes) else value


def is_s3(scheme: str) -> bool:
    """Return whether a scheme is S3's."""
    return scheme in {"s3", "s3a"}


def _complete_s3(config: dict[str, Any]) -> None:
    """Fill in what the options leave out from the environment."""
    from .aws_profile import credentials_of, profile_name, read_profile

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        config.setdefault("endpoint", endpoint)
    name = profile_name()
    profile = read_profile(name)
    if profile.get("endpoint_url") and not is_true(os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")):
        config.setdefault("endpoint", profile["endpoint_url"])
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or profile.get("region")
    config.setdefault("region", region or "us-east-1")
    is_given = not config.keys().isdisjoint({"access_key_id", CREDENTIALS_OPTION, "web_identity_token_file"})
    if is_given or is_true(config.get("skip_signature", "")) or any(os.environ.get(name) for name in _S3_IDENTITY):
        return
    if "aws_access_key_id" in profile:
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile.get("aws_secret_access_key", "")
        if "aws_session_token" in profile:
            config["session_token"] = profile["aws_session_token"]
    elif profile.get("web_identity_token_file") and profile.get("role_arn"):
        for setting in ("web_identity_token_file", "role_arn", "role_session_name"):
            if profile.get(setting):
                config[setting] = profile[setting]
    elif (provider := credentials_of(name, profile)) is not None:
        config[CREDENTIALS_OPTION] = provider
