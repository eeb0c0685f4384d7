"""Encoders: the forms in which images may leave a device, and the features that hide them."""
