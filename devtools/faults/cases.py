"""All cases of the bench, in the order of the table."""

from __future__ import annotations

from .case import Case
from .disk_cases import DISK_CASES
from .hosts.cases import HOST_CASES
from .network_cases import NETWORK_CASES
from .process_cases import PROCESS_CASES

CASES: list[Case] = [*NETWORK_CASES, *PROCESS_CASES, *DISK_CASES, *HOST_CASES]
