"""Who serves a task after the end device: mapping, routes, bounds, escalation, the adaptive scheme."""
