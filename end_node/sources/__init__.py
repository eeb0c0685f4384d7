"""Where pictures come from on this device: streams, cameras, folders and snapshots."""
