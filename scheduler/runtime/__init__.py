"""The life of a scheduler: leader election, assembly of the parts, background loops."""
