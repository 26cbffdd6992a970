"""Structured output: what a text must look like (`constraint`), and the tokens that a grammar forces (`forced_tokens`).

Grammars are compiled by `llguidance`, first in a limited child process (`compiler_pool`); GBNF and JSON schemas are translated for it.
"""
