"""Training with untrusted workers: robust centres of their updates, a score for each, and units that are computed
again.
"""
