"""A job from its submission to its last result: what was asked, how far it is, where answers go."""
