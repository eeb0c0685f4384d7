"""Pictures that a device keeps to learn from, with the answers of the tiers above."""
