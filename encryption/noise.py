"""The noise that a device adds to features: for the same image the same each time.

Features are often sent more than once, by retries, hedges and other devices that take a task over. Noise drawn again
for each copy could be removed by averaging the copies. This noise is equal in all copies: it is a function of a secret
key, the encoder and the image. BLAKE2b (RFC 7693) with the key digests the image. From the digest, SHAKE-128 (FIPS 202)
gives numbers of 16 bits, which cannot be told from chance without the key. The normal quantile of each is the noise:
one of 65,536 values within 4.4 deviations.

Each job has its own key. The scheduler makes it from a secret that it keeps, and sends it with each task, only to nodes
that get the pixels too. So a captured device reveals only the noise of jobs that it has worked for.
"""

from __future__ import annotations

import functools
import hashlib
import math
import statistics

import numpy as np

from models.manifest import EncoderEntry
from tierkit.tensors import Array

__all__ = ["KEY_BYTES", "NOISE", "draw_noise", "job_key"]

KEY_BYTES = 32
_PERSON = b"terrace noise"


def job_key(secret: bytes, content: str) -> str:
    """Key of the noise of a job's images, hexadecimal.

    Args:
        secret: 16 to 64 bytes that the nodes above never learn.
        content: digest of the job's images: the same images submitted again get the same noise.
    """
    return hashlib.blake2b(content.encode(), key=secret, digest_size=KEY_BYTES, person=_PERSON).hexdigest()


def draw_noise(encoder: EncoderEntry, images: Array, keys: Array) -> Array:
    """Gaussian noise of deviation `encoder.noise` for the features of some images.

    Args:
        images: UINT8 `[n, h, w, 3]`.
        keys: of each image, UINT8 `[n, KEY_BYTES]`.

    Returns:
        FP32 `[n, channels, h, w]`, each image's a function of nothing but encoder, key and image.
    """
    # Two encoders, or two settings of one, must not share noise: the difference of their features would be free of it.
    own = f"{encoder.head.sha256} {encoder.noise!r} ".encode()
    length = 2 * math.prod(encoder.feature_shape)
    drawn = b"".join(
        hashlib.shake_128(
            own + hashlib.blake2b(image.tobytes(), key=key.tobytes(), digest_size=32, person=_PERSON).digest()
        ).digest(length)
        for key, image in zip(keys, images, strict=True)
    )
    noise: Array = _quantiles()[np.frombuffer(drawn, "<u2")]
    noise *= np.float32(encoder.noise)
    return noise.reshape(-1, *encoder.feature_shape)


@functools.cache
def _quantiles() -> Array:
    """Quantiles of the standard normal distribution in the middles of 65,536 equal shares, FP32."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((share + 0.5) / 65_536) for share in range(65_536)], np.float32)


class _Noise:
    """Implements `encryption.hiding.Hiding`; the tail was trained to bear the noise."""

    def hide(self, encoder: EncoderEntry, images: Array, features: Array, keys: Array | None) -> Array:
        assert keys is not None  # `encoder.noise` is above 0
        hidden = draw_noise(encoder, images, keys)
        hidden += features
        return hidden

    def restore(self, encoder: EncoderEntry, features: Array) -> Array:
        return features


NOISE = _Noise()
