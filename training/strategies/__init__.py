"""Strategies of the parameter server: rules that turn updates into weights."""
