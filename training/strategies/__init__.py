"""How updates become weights."""
