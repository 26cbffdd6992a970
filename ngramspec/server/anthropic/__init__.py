"""Anthropic's Messages API, as Claude Code and Anthropic's SDKs speak it: /v1/messages, /v1/messages/count_tokens.

Requests in Anthropic's words enter and become conversations like those of OpenAI's chats; what the engine wrote leaves as content blocks.
"""
