"""The uplink of a device: answers to the scheduler, pictures to upstream nodes, with their times and amounts."""
