"""How well an attacker can get pictures back from what an encoder sends (needs the extra 'train')."""
