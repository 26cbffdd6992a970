"""Drafting: n-gram tables and further drafters, mixed into one draft tree per sequence.

Committed tokens enter, and draft nodes that are expected to pay for their rows leave. It knows neither models nor requests, and imports
neither torch nor transformers (`trained` apart).
"""

from ngramspec.speculative.drafter import Candidates, Drafter
from ngramspec.speculative.proposer import TreeProposer, warmup

__all__ = ["Candidates", "Drafter", "TreeProposer", "warmup"]
