"""Training runs: which runs exist, how far they are, and where workers find their hosts."""
