"""Sources of pictures on this device: streams, cameras, folders and snapshots."""
