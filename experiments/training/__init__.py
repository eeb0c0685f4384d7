"""Training on virtual time: scaling, delay, slow workers, bytes and faults."""
