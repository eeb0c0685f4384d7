"""What the fleet does and did: counts second by second, what happened to nodes and tasks, one picture of it all."""
