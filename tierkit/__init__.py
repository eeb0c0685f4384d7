"""Common parts of Terrace's services: errors, wire format, service runtime, client, fleet launcher.

Knows nothing about networks, tiers' behaviour or scheduling; the packages for these are above this one and import it.
"""
