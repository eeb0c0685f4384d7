"""The history of the fleet: counts per second, and events of nodes and tasks."""
