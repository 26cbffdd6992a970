"""Turns text into token ids (`encode`, which also checks prompts) and streams of ids into text that may be shown (`detokenizer`)."""
