"""The old name of `ngramspec.papers.lookahead`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.papers.lookahead")
