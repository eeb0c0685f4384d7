"""A dense layer that learns a share of its weights and predicts the others (Denil et al. 2013, arXiv:1306.0543)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PredictedLinear"]

_REACH = 2.0
"""Pixels: the width of the kernel by which weights of near pixels are alike."""
_RIDGE = 1e-2
"""Keeps the prediction stable where learned pixels lie close together."""
_SEED = 0


class PredictedLinear(nn.Module):
    """Dense layer from values `[n, inputs]` of square grey images to `[n, outputs]`.

    It learns the weights of some pixels, the same ones for each output. The other weights follow by kernel ridge
    regression with a squared exponential kernel over the distance in the image.

    Args:
        inputs: a square number.
        share: share of the weights that are learned, above 0 and below 1.

    Raises:
        ValueError: the number of inputs is not a square, or the share is outside its bounds.
    """

    def __init__(self, inputs: int, outputs: int, share: float) -> None:
        super().__init__()
        side = math.isqrt(inputs)
        if side * side != inputs:
            raise ValueError(f"predicted weights need the pixels of a square grey image, and {inputs} is not a square")
        if not 0 < share < 1:
            raise ValueError(f"predicted must be above 0 and below 1, got {share}")
        learned = max(1, round(share * inputs))
        chosen = np.sort(np.random.default_rng(_SEED).permutation(inputs)[:learned])
        places = np.stack(np.divmod(np.arange(inputs), side), axis=1)
        apart = ((places[:, None] - places[chosen]) ** 2).sum(axis=2)
        kernel = np.exp(-apart / (2 * _REACH**2))
        spread = np.linalg.solve(kernel[chosen] + _RIDGE * np.eye(learned), kernel.T)
        # It follows from the size alone, so it is in no file of weights.
        self.register_buffer("spread", torch.from_numpy(spread.astype(np.float32)), persistent=False)
        """`[learned, inputs]`: contribution of each learned weight to the weight of each pixel."""
        self.weight = nn.Parameter(torch.empty(outputs, learned))
        self.bias = nn.Parameter(torch.empty(outputs))
        # All weights begin as widely spread as those of `nn.Linear`.
        bound = 1 / math.sqrt(inputs)
        gain = float(np.sqrt((spread**2).sum(axis=0).mean()))
        nn.init.uniform_(self.weight, -bound / gain, bound / gain)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, values: Tensor) -> Tensor:
        assert isinstance(self.spread, Tensor)
        # Few products: the images are spread first, and then meet the learned weights only.
        return F.linear(F.linear(values, self.spread), self.weight, self.bias)

    def as_linear(self) -> nn.Linear:
        """Return the same layer with all its weights."""
        assert isinstance(self.spread, Tensor)
        whole = nn.Linear(self.spread.shape[1], len(self.bias))
        with torch.no_grad():
            whole.weight.copy_(self.weight @ self.spread)
            whole.bias.copy_(self.bias)
        return whole
