"""What every Terrace service is made of: errors, wire format, service runtime, client, fleet launcher.

Knows nothing of networks, tiers' behaviour or scheduling; those packages stand above this one and import it.
"""
