"""Structured output: what a text must look like (`base`), and the tokens that a grammar forces (`forced_tokens`).

Grammars are compiled by `llguidance`, tried first in a limited process (`trial`, `compiling`); GBNF and JSON schemas are translated for it.
"""
