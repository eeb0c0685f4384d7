"""The end device: answers coarse at once, then asks an upstream node for the fine answer."""
