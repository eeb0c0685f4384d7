"""Ranks: processes that train together and exchange with each other, without a host."""
