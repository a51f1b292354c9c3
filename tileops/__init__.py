"""LLM attention operators as a torch.library package.

Importing it registers every operator and loads no kernel language. The Op classes live in
`tileops.attention`; the dispatcher operators are `torch.ops.tileops.*`.
"""

from ops_registry.targets import (
    BUILTIN,
    ExternalTarget,
    Kernel,
    Lowering,
    Target,
    register_target,
    unregister_target,
)
from tileops import attention
from tileops._fingerprint import extend_cache_key
from tileops.report import explain

__version__ = "0.1.0"

__all__ = [
    "BUILTIN",
    "ExternalTarget",
    "Kernel",
    "Lowering",
    "Target",
    "attention",
    "explain",
    "register_target",
    "unregister_target",
]

extend_cache_key()
