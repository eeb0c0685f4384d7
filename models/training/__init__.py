"""Training of the tier networks. Needs the extra `train` (torch); nothing that serves imports this package."""
