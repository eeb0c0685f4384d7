"""What leaves a device: answers to the scheduler, pictures to upstream nodes; when, and how much."""
