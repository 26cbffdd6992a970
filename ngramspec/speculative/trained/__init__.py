"""Drafters that are models themselves: a smaller draft model, and what drafters that write token by token share."""
