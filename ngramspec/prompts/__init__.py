"""Prompts: chats through the model's template, text to be filled in between two others, and tool calls in what the model answers.

Messages, texts and tools enter, token ids leave; `tool_calls` reads a text back. The server and the engine's own methods share them.
"""
