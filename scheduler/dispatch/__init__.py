"""Sending tasks to end devices and taking their answers, however often devices fail."""
