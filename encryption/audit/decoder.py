"""A network that is trained to turn what arrives back into pictures; the attacks that learn all use it.

It learns from pairs of a picture and of what an encoder sends for it. It begins as the best linear map from the
neighbourhood of a position to its pixels, which is found at once, and learns what is to be added to that. At first the
squared error is made small, which finds the colours, then 1 - SSIM as well, which sharpens what the first leaves
blurred; whichever state does better on pictures kept back is used. So no encoder looks safe because the attack aimed at
another measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encryption.audit.similarity import as_planes, mean_ssim, ssim
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["InversionDecoder", "Lessons", "Trained", "check_shapes", "reconstruct", "train_decoder"]

_BATCH = 128
_KEPT_BACK = 256
"""Pictures that show how far the training is; none of them is trained on."""
_EXAMPLES, _EXAMPLES_AT_ONCE = 256, 32
_CHECK_STEPS = 100
_SQUARED_SHARE = 0.4
_RATE = 2e-3
_REACH = 5
_RIDGE = 1e-4
"""Parameters of the linear map: positions across that it sees, and the pull of its weights to zero."""
_GRAIN = 2
"""Width in pixels of the block that the last layer paints at each position."""

Send = Callable[[Array], Array]
"""Images UINT8 `[n, h, w, 3]` to what arrives, FP32 `[n, channels, H, W]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Length of a decoder's training."""

    images: int
    """Pictures shown in all, counting each time that one comes again."""
    enough: float
    """SSIM on the pictures kept back at which there is nothing left to find out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A decoder, and how it did on the pictures kept back."""

    decoder: InversionDecoder
    shown: int
    ssim: float


class InversionDecoder(nn.Module):
    """Decoder from received features, FP32 `[n, channels, H, W]`, to images in [0, 1] `[n, 3, h, w]`.

    It has residual blocks at the resolution of the features, and at each doubling up to half the image's resolution.
    Finer features are first folded into channels, which loses nothing and costs less.

    Args:
        examples: some received features.
        images: the pictures behind them, UINT8 `[n, h, w, 3]`, square.
    """

    def __init__(self, examples: Tensor, images: Array) -> None:
        super().__init__()
        side = images.shape[1]
        self._fold = _fold(examples.shape[2], side)
        folded = F.pixel_unshuffle(examples, self._fold)
        channels, at = folded.shape[1:3]
        spread = folded.std(dim=(0, 2, 3), keepdim=True)[0]
        self.register_buffer("centre", folded.mean(dim=(0, 2, 3), keepdim=True)[0])
        self.register_buffer("spread", spread.clamp_min(float(spread.max()) * 1e-3 + 1e-12))
        block = side // at
        self.linear = nn.Sequential(
            nn.Conv2d(channels, 3 * block**2, _REACH, padding=_REACH // 2), nn.PixelShuffle(block)
        )
        self._solve(examples, images, block)
        width = 96 if at <= side // 4 else 64
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
        layers += [_Block(width) for _ in range(3)]
        while at * _GRAIN < side:
            layers += [nn.Conv2d(width, 4 * 48, 1), nn.PixelShuffle(2), _Block(48)]
            width, at = 48, at * 2
        paint = nn.Conv2d(width, 3 * _GRAIN**2, 3, padding=1)
        nn.init.zeros_(paint.weight)
        nn.init.zeros_(paint.bias)
        self.layers = nn.Sequential(*layers, nn.ReLU(), paint, nn.PixelShuffle(_GRAIN))

    def forward(self, features: Tensor) -> Tensor:
        values = self._normalised(features)
        return self.linear(values).float() + self.layers(values).float()

    def _normalised(self, features: Tensor) -> Tensor:
        values = (F.pixel_unshuffle(features, self._fold) - self.centre) / self.spread
        return values.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def _solve(self, examples: Tensor, images: Array, block: int) -> None:
        """Ridge regression of each block of pixels on the values around its position."""
        convolution = self.linear[0]
        pixels = F.pixel_unshuffle(as_planes(images), block)
        unknowns = convolution.weight[0].numel() + 1
        normal, sums = torch.zeros(unknowns, unknowns), torch.zeros(unknowns, pixels.shape[1])
        for start in range(0, len(examples), _EXAMPLES_AT_ONCE):
            some = slice(start, start + _EXAMPLES_AT_ONCE)
            around = F.unfold(self._normalised(examples[some]), _REACH, padding=_REACH // 2)
            around = F.pad(around.transpose(1, 2).flatten(0, 1), (0, 1), value=1.0)
            normal += around.T @ around
            sums += around.T @ pixels[some].permute(0, 2, 3, 1).flatten(0, 2)
        normal += _RIDGE * float(normal.diagonal().max()) * torch.eye(unknowns)
        found = torch.linalg.solve(normal, sums)
        convolution.weight.copy_(found[:-1].T.reshape(convolution.weight.shape))
        convolution.bias.copy_(found[-1])


def check_shapes(features: Sequence[int], image: Sequence[int]) -> None:
    """Refuse what no decoder can be built for.

    Args:
        features: channels, height and width.
        image: height, width and colours.

    Raises:
        DataError: one of them is not as high as wide, or the image is not larger by a power of two.
    """
    (_, high, wide), (height, width, _) = features, image
    at = high // _fold(high, height)
    times = height // at
    if high != wide or height != width or at * _fold(high, height) != high or at * times != height or times & times - 1:
        raise DataError(
            f"no decoder is known for features of {high} x {wide} and pictures of {height} x {width}: both must be as "
            "high as wide, and the pictures larger by 1, 2, 4, ..."
        )


def _fold(features: int, image: int) -> int:
    """Positions across that go into the channels of one."""
    return max(1, features * _GRAIN // image)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layers(values)


def train_decoder(
    images: Array, send: Send, lessons: Lessons, seed: int, tell: Callable[[int, int], None] = lambda done, of: None
) -> Trained:
    """Train a decoder on pictures and the features that `send` makes of them. A picture is sent again each time that it
    is shown, every other time mirrored.

    Args:
        images: the attacker's pictures, UINT8 `[n, h, w, 3]`; the last ones are held out for measuring.
        tell: called with the number of steps done, and with the number in the whole budget.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kept = min(_KEPT_BACK, len(images) // 4)
    own, held = images[: len(images) - kept], images[len(images) - kept :]
    held_sent = send(held)
    first = own[:_EXAMPLES]
    decoder = InversionDecoder(torch.from_numpy(send(first)), first).to(memory_format=torch.channels_last)
    batch = min(_BATCH, len(own))
    steps = max(1, lessons.images // batch)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1, pct_start=0.1)
    best = {name: value.clone() for name, value in decoder.state_dict().items()}
    best_ssim = mean_ssim(held, reconstruct(decoder, held_sent))
    shown, order = len(first), np.empty(0, dtype=np.int64)
    for step in range(steps):
        if best_ssim >= lessons.enough:
            break
        if len(order) < batch:
            order = rng.permutation(len(own))
        chosen, order = own[order[:batch]], order[batch:]
        mirrored = rng.random(batch) < 0.5
        chosen = np.where(mirrored[:, None, None, None], chosen[:, :, ::-1], chosen)
        squared_only = step < _SQUARED_SHARE * steps
        _learn(decoder, optimizer, torch.from_numpy(send(chosen)), chosen, squared_only)
        schedule.step()
        shown += batch
        tell(step + 1, steps)
        last = step + 1 == steps or step + 1 == round(_SQUARED_SHARE * steps)
        if last or (step + 1) % _CHECK_STEPS == 0:
            alike = mean_ssim(held, reconstruct(decoder, held_sent))
            if alike > best_ssim:
                best_ssim, best = alike, {name: value.clone() for name, value in decoder.state_dict().items()}
    decoder.load_state_dict(best)
    return Trained(decoder=decoder.eval(), shown=shown, ssim=best_ssim)


def _learn(
    decoder: InversionDecoder, optimizer: torch.optim.Optimizer, sent: Tensor, images: Array, squared_only: bool
) -> None:
    decoder.train()
    wanted = as_planes(images)
    with torch.autocast("cpu", torch.bfloat16):
        painted = decoder(sent)
    loss = F.mse_loss(painted, wanted)
    if not squared_only:
        loss = loss + 1 - ssim(painted, wanted).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def reconstruct(decoder: InversionDecoder, sent: Array) -> Array:
    """Pictures UINT8 `[n, h, w, 3]` of what arrived, FP32 `[n, channels, H, W]`."""
    decoder.eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(sent), _BATCH):
            painted = decoder(torch.from_numpy(sent[start : start + _BATCH]))
            parts.append((painted * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(parts)
