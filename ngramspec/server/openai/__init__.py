"""OpenAI's routes: /v1/completions, /v1/chat/completions, /v1/models.

Requests in OpenAI's words enter and become inputs for the admission queue; what the engine wrote leaves in OpenAI's words.
It does not know llama.cpp's words, nor how requests are admitted and run.
"""
