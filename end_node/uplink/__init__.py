"""The uplink of a device: answers to the scheduler, pictures to upstream nodes; when, and how much."""
