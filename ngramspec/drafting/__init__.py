"""What the engine drafts with: n-gram tables and further sources, mixed into one tree per sequence.

Committed tokens enter, and leave as the draft nodes that the budget finds worth verifying.
It does not know what a model or a request is, and imports neither torch nor transformers.
"""

from ngramspec.drafting.base import Candidates, Drafter
from ngramspec.drafting.proposer import Proposer, warmup

__all__ = ["Candidates", "Drafter", "Proposer", "warmup"]
