"""The old name of `ngramspec.integrations.openai_prediction`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.integrations.openai_prediction")
