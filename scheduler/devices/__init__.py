"""I/O around the device list: probes of nodes, and what operators do to nodes."""
