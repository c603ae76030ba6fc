"""What ``penstock.tools`` exports, imported when it is first used; names are added here alone."""

from .audit import AuditReport as AuditReport
from .audit import EpochAccount as EpochAccount
from .audit import audit as audit
from .index_costs import CostExpression as CostExpression
from .index_costs import index_costs as index_costs
from .index_costs import write_costs as write_costs
from .inspect import Inspection as Inspection
from .inspect import Spread as Spread
from .inspect import inspect_dataset as inspect_dataset
from .mixed_audit import SourceAccount as SourceAccount
from .pack import PackSummary as PackSummary
from .pack import pack as pack
from .pack import pack_once as pack_once
from .recheck import Rechecked as Rechecked
from .recheck import RecheckResult as RecheckResult
from .recheck import recheck as recheck
from .verify import VerifyResult as VerifyResult
from .verify import verify as verify
from .verify_chunks import Flaw as Flaw
