"""Training by Terrace compared with training by other programs."""
