"""The end device: answers coarse at once, then asks an upper node for the fine answer."""
