"""The host of a run, or parameter server: keeps the weights, grants leases, takes updates."""
