"""How much to draft: predicted pass times (`cost_model`), the threshold that a node must exceed (`threshold`, `marginal_cost`), measured
steps (`step_timer`), and when to look for drafts less often (`backoff`)."""
