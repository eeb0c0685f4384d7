"""The scheduler: live device list, durable jobs, mapping of end devices to upper nodes, dispatch."""
