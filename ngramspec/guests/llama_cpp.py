"""The old name of `ngramspec.integrations.llama_cpp`."""

from ngramspec.guests import alias_module

alias_module(__name__, "ngramspec.integrations.llama_cpp")
