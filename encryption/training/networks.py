"""Head, tail and adversary of a learned encoder, and the channel between head and tail."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encryption.training.config import EncoderConfig
from models.training.networks.mobilenet import MobileNetV1
from models.training.networks.wideresnet import WideResNet
from tierkit.errors import InvalidInput

__all__ = ["Decoder", "Head", "Tail", "first_layers", "transmit"]


def _conv_bn_relu(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class Head(nn.Module):
    """Float images `[n, 3, h, w]` to features in [0, 1], `[n, channels, H, W]`.

    Args:
        source: the network that the configuration takes its first layers from, if it keeps any.
    """

    def __init__(self, source: nn.Module, config: EncoderConfig) -> None:
        super().__init__()
        self.body, width = _kept(source, config) if config.keep else _own(config)
        self.features = nn.Sequential(
            nn.Conv2d(width, config.channels, 1, bias=False), nn.BatchNorm2d(config.channels), nn.Hardtanh(0.0, 1.0)
        )
        # Most features begin within the bounds.
        nn.init.constant_(self.features[1].weight, 0.25)
        nn.init.constant_(self.features[1].bias, 0.5)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(self.body(images))
        return features


def _own(config: EncoderConfig) -> tuple[nn.Sequential, int]:
    ends = (3, *config.widths)
    layers = (_conv_bn_relu(ends[i], ends[i + 1], stride) for i, stride in enumerate(config.strides))
    return nn.Sequential(*layers), ends[-1]


def _kept(source: nn.Module, config: EncoderConfig) -> tuple[nn.Sequential, int]:
    body = first_layers(source, config.keep)
    return body, [module.out_channels for module in body.modules() if isinstance(module, nn.Conv2d)][-1]


def first_layers(network: nn.Module, blocks: Iterable[int]) -> nn.Sequential:
    """A copy of a network's first layers: what comes before its blocks, and these blocks."""
    parts: Any = network
    match network:
        case MobileNetV1():
            stem = [parts.stem]
        case WideResNet():
            stem = [parts.encoder]
        case _:
            stem = [parts.encoder, parts.norm, parts.relu, parts.pool]
    return copy.deepcopy(nn.Sequential(*stem, *(parts.blocks[index] for index in blocks)))


class Tail(nn.Module):
    """Features `[n, channels, H, W]` to logits `[n, classes]`: a convolution, then the upper network's last blocks."""

    def __init__(self, upper: nn.Module, encoder: EncoderConfig) -> None:
        super().__init__()
        parts: Any = upper
        blocks = list(parts.blocks)
        if encoder.cut >= len(blocks):
            raise InvalidInput(f"the upper network has {len(blocks)} blocks; a cut after {encoder.cut} leaves none")
        width = next(module.in_channels for module in blocks[encoder.cut].modules() if isinstance(module, nn.Conv2d))
        self.restore = _conv_bn_relu(encoder.channels, width)
        self.blocks = nn.Sequential(*blocks[encoder.cut :])
        # A wide residual network normalises after its last block, others within each.
        self.final = (
            nn.Sequential(parts.norm, nn.ReLU(inplace=True)) if isinstance(upper, WideResNet) else nn.Identity()
        )
        self.classifier = parts.classifier

    def forward(self, features: Tensor) -> Tensor:
        return self.answer(self.restore(features))

    def answer(self, restored: Tensor) -> Tensor:
        """Logits from what the restoring convolution gives."""
        logits: Tensor = self.classifier(torch.mean(self.final(self.blocks(restored)), dim=(2, 3)))
        return logits


class Decoder(nn.Module):
    """The adversary: features `[n, channels, H, W]` to images in [0, 1], `[n, 3, h, w]`.

    Args:
        channels: of the features.
        upscale: h / H, a power of two.
        width: channels of its layers.
    """

    def __init__(self, channels: int, upscale: int, width: int) -> None:
        super().__init__()
        self.enter = _conv_bn_relu(channels, width)
        self.deepen = nn.ModuleList(_conv_bn_relu(width, width) for _ in range(2))
        layers: list[nn.Module] = []
        while upscale > 2:
            layers += [nn.Conv2d(width, 4 * (width // 2), 1), nn.PixelShuffle(2), _conv_bn_relu(width // 2, width // 2)]
            width, upscale = width // 2, upscale // 2
        self.grow = nn.Sequential(*layers)
        self.paint = nn.Sequential(nn.Conv2d(width, 3 * upscale**2, 3, padding=1), nn.PixelShuffle(upscale))

    def forward(self, features: Tensor) -> Tensor:
        x = self.enter(features)
        for layer in self.deepen:
            x = x + layer(x)
        return torch.sigmoid(self.paint(self.grow(x)).float())


def transmit(features: Tensor, config: EncoderConfig) -> Tensor:
    """Return the features that arrive above: noise is added, then each value is rounded to one of the levels.

    Gradients pass as if nothing had been rounded (straight-through estimate, arXiv:1308.3432), and stop where a
    value leaves [0, 1].
    """
    noisy = features.float()
    if config.noise:
        noisy = noisy + config.noise * torch.randn_like(noisy)
    noisy = F.hardtanh(noisy, 0.0, 1.0)
    steps = config.levels - 1
    return noisy + ((noisy * steps).round() / steps - noisy).detach()
