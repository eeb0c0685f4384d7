"""Pictures from their files: decoded within bounds, resized, and turned into rows of a tensor."""

from models.pictures.decode import MAX_PIXELS, Picture, check_size, decoder, is_large, resized, within

__all__ = ["MAX_PIXELS", "Picture", "check_size", "decoder", "is_large", "resized", "within"]
