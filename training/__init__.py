"""Training on the fleet: workers compute gradients, a host keeps the weights."""
