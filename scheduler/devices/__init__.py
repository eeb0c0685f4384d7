"""Who may receive tasks now: the device list, its failure detector, its circuit breakers."""
