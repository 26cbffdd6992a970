"""The old name of `ngramspec.integrations.transformers`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.integrations.transformers")
