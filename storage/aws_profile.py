"""The profile of AWS's shared files: what it says, and its credentials where they come from elsewhere and expire.

A ``credential_process`` is run here. What else AWS's own tools know (IAM Identity Center, roles of other profiles) is
asked of botocore, where it is installed.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from .errors import NoCredentialsError

# obstore renews credentials 5 minutes before they expire, botocore 10: its credentials hold for at least this long.
_BOTOCORE_HOLDS = timedelta(minutes=12)
_RENEWED_BEFORE = timedelta(minutes=5)
_PROCESS_S = 60.0
# What only botocore turns into credentials.
_FOR_BOTOCORE = ("sso_session", "sso_start_url", "role_arn", "login_session")


def profile_name() -> str:
    """The profile that the environment chooses."""
    return os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"


def read_profile(name: str) -> dict[str, str]:
    """Read a profile's settings from the shared files; the credentials file wins. Empty if there is no such profile."""
    home = Path.home() / ".aws"
    files = (
        (os.environ.get("AWS_CONFIG_FILE", home / "config"), ["default"] if name == "default" else ["profile", name]),
        (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"), [name]),
    )
    found: dict[str, str] = {}
    for path, wanted in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(os.path.expanduser(path), encoding="utf-8")  # noqa: PTH111 - as in_home
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in parser.sections():
            if section == " ".join(wanted) or _words(section) in (wanted, ["profile", *wanted]):
                found.update(parser.items(section))
    return found


def _words(section: str) -> list[str]:
    """The words of a section's name, whose second may be in quotes."""
    try:
        return shlex.split(section)
    except ValueError:
        return []


@dataclass(frozen=True)
class ProfileCredentials:
    """Credentials of a profile, as obstore asks for them again and again: a mapping with the time of their end.

    Called by whichever thread sends a request. The credentials that are valid are kept for all stores of the process.
    """

    profile: str
    process: str | None = None

    def __call__(self) -> dict[str, Any]:
        """Raises NoCredentialsError where there are none; the message has nothing of what a command printed."""
        if self.process is None:
            return _ask_botocore(self.profile)
        with _lock:
            known = _valid.get(self)
            if known is None or (known["expires_at"] or _FAR) - datetime.now(UTC) < _RENEWED_BEFORE:
                known = _valid[self] = _run_process(self.profile, self.process)
            return known


_FAR = datetime.max.replace(tzinfo=UTC)
_lock = threading.Lock()
_valid: dict[ProfileCredentials, dict[str, Any]] = {}
_sessions: dict[str, Any] = {}


def credentials_of(profile: str, said: dict[str, str]) -> ProfileCredentials | None:
    """Choose the source of a profile's credentials from its settings; None if it holds them itself, or has none."""
    if said.get("credential_process"):
        return ProfileCredentials(profile, said["credential_process"])
    return ProfileCredentials(profile) if any(said.get(name) for name in _FOR_BOTOCORE) else None


def _run_process(profile: str, command: str) -> dict[str, Any]:
    """Run a command and return the credentials that it prints, in AWS's ``credential_process`` form, version 1."""
    where = f"the credential_process of the AWS profile {profile!r}"
    try:
        ran = subprocess.run(shlex.split(command), check=False, capture_output=True, timeout=_PROCESS_S)
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        raise NoCredentialsError(f"{where} could not be run ({type(exc).__name__}); run it by hand") from None
    if ran.returncode:
        raise NoCredentialsError(f"{where} failed (exit code {ran.returncode}); run it by hand to see why")
    try:
        said = json.loads(ran.stdout)
        expires = said.get("Expiration")
        ends = None if expires is None else datetime.fromisoformat(expires)
        if ends is not None and ends.tzinfo is None:
            ends = ends.replace(tzinfo=UTC)
        if said["Version"] != 1:
            raise ValueError
        return {
            "access_key_id": str(said["AccessKeyId"]),
            "secret_access_key": str(said["SecretAccessKey"]),
            "token": said.get("SessionToken"),
            "expires_at": ends,
        }
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise NoCredentialsError(
            f"{where} printed no JSON of version 1 with AccessKeyId and SecretAccessKey ({type(exc).__name__})"
        ) from None


def _ask_botocore(profile: str) -> dict[str, Any]:
    """Credentials that botocore finds for a profile, and renews."""
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise NoCredentialsError(
            f"the AWS profile {profile!r} (SSO, or a role) needs boto3: `pip install boto3`, or first run "
            f'`eval "$(aws configure export-credentials --profile {shlex.quote(profile)} --format env)"`'
        ) from None
    try:
        with _lock:
            if profile not in _sessions:
                _sessions[profile] = botocore.session.Session(profile=profile).get_credentials()
            found = _sessions[profile]
        frozen = None if found is None else found.get_frozen_credentials()
    except (BotoCoreError, ClientError) as exc:
        raise NoCredentialsError(
            f"the AWS profile {profile!r} gives no credentials ({type(exc).__name__}); sign in anew, as with "
            f"`aws sso login --profile {shlex.quote(profile)}`"
        ) from None
    if frozen is None or not frozen.access_key:
        raise NoCredentialsError(f"the AWS profile {profile!r} gives no credentials; check ~/.aws/config")
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _BOTOCORE_HOLDS,
    }


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
