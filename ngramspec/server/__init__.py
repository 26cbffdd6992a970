"""Completions over HTTP: OpenAI's routes, those of llama.cpp that editors use, statistics, and a page to try it in a browser.

An engine and settings enter, an ASGI application leaves; `serve` listens for it.
It knows the engine and nothing below it but plain types.
"""
