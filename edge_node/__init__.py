"""The edge server: the fine answer from a network of medium size, close to the devices."""
