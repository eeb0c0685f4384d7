"""Workers that nobody trusts: robust centres of their updates, a score for each, and units that are computed again."""
