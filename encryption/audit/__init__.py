"""Measures how well an attacker can get pictures back from the data that an encoder sends (needs the extra 'train')."""
