"""Where drafts come from: n-gram tables and further sources, mixed into one tree per sequence that the budget finds worth verifying."""

from .base import Candidates, Drafter
from .proposer import Proposer, warmup

__all__ = ["Candidates", "Drafter", "Proposer", "warmup"]
