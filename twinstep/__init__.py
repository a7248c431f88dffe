"""The instruments: are two functions the same, and what do they send? Any JAX functions; nothing of this model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinstep.communication.compiled import collectives as collectives
    from twinstep.communication.expected import assert_collectives as assert_collectives
    from twinstep.communication.traced import traced_collectives as traced_collectives
    from twinstep.equivalence.compare import assert_equivalent as assert_equivalent
    from twinstep.equivalence.compare import compare as compare
    from twinstep.equivalence.report import Report as Report

# Imported when first asked for: pytest loads this package in every project that has it installed, before that project's
# own conftest.py could settle JAX.
EXPORTS = {
    "Report": "twinstep.equivalence.report",
    "assert_collectives": "twinstep.communication.expected",
    "assert_equivalent": "twinstep.equivalence.compare",
    "compare": "twinstep.equivalence.compare",
    "collectives": "twinstep.communication.compiled",
    "traced_collectives": "twinstep.communication.traced",
}
"""Public name to the module that has it."""
__all__ = list(EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})
