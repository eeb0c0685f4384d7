"""The cloud: the fine answer from the strongest network."""
