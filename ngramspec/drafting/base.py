"""The old name of `ngramspec.speculative.drafter`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.speculative.drafter")
