"""Completions over HTTP: OpenAI's routes, those of llama.cpp that editors use, statistics, and a page to try it in a browser.

Knows the engine and nothing below it.
"""
