"""Releases: their networks' files, the checks of nodes by probe pictures, and the change from one to another."""
