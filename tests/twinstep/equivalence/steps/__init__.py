"""Training steps as other projects write them, each with a place for mistakes: `KINDS`."""

from tests.twinstep.equivalence.steps import modules, trees
from tests.twinstep.equivalence.steps.kinds import MISTAKES, Kind, Mistake

KINDS = {kind.name: kind for kind in (*trees.KINDS, *modules.KINDS)}

__all__ = ["KINDS", "MISTAKES", "Kind", "Mistake"]
