"""Drafters that compute with a model: a smaller one, the first layers of the target, or the target's own head for further tokens."""
