"""Ollama's routes under /api, for the clients and editors that speak them: chat, generate, and what they ask of models.

Requests in Ollama's words enter and become conversations or texts as those of other routes do; answers leave as lines of JSON.
"""
