"""Training of learned encoders: a head for the device and a tail for the upper tiers, against an adversary."""
