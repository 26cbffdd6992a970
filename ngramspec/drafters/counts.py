"""The old name of `ngramspec.papers.count_drafter`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.papers.count_drafter")
