"""The old name of `ngramspec.models.loader`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.models.loader")
