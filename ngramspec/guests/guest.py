"""The old name of `ngramspec.integrations.draft_session`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.integrations.draft_session")
