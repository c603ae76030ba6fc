"""The names of ``penstock.tools`` that ``penstock.loader`` exports: users of a data set find them beside the loader."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tools import AuditReport as AuditReport
    from ..tools import CostExpression as CostExpression
    from ..tools import EpochAccount as EpochAccount
    from ..tools import Flaw as Flaw
    from ..tools import Inspection as Inspection
    from ..tools import PackSummary as PackSummary
    from ..tools import Rechecked as Rechecked
    from ..tools import RecheckResult as RecheckResult
    from ..tools import SourceAccount as SourceAccount
    from ..tools import Spread as Spread
    from ..tools import VerifyResult as VerifyResult
    from ..tools import audit as audit
    from ..tools import index_costs as index_costs
    from ..tools import inspect_dataset as inspect_dataset
    from ..tools import pack as pack
    from ..tools import pack_once as pack_once
    from ..tools import recheck as recheck
    from ..tools import verify as verify
    from ..tools import write_costs as write_costs
else:
    from ..tools import __getattr__ as __getattr__
