"""Convolutions as matrix products, for layers where the CPU's convolution kernels are slow.

Measured with oneDNN 3 on a core with AMX, bf16, batch 256: the weight gradient of a 3x3 convolution over 2x2
positions and 512 channels takes 72 ms as a convolution and 5 ms as a matrix product; the input gradient of a strided
depthwise convolution takes 50 ms, against 3 ms for an unstrided one whose output is then thinned out. The parameters
are those of `torch.nn.Conv2d`, so weights pass from one form to the other unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["use_matrix_products"]

# Up to this many output positions a matrix product wins; above it the convolution kernels have enough to do.
_FEW_POSITIONS = 16


class _ColumnProduct(torch.autograd.Function):
    """`[n, h, w, c]` (padded) and `[out, k, k, c]` to `[n, h', w', out]`: im2col, then one matrix product."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, stride: int) -> Tensor:
        n, height, width, channels = padded.shape
        out_channels, kernel = weight.shape[0], weight.shape[1]
        h, w = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        columns = torch.cat(
            [
                padded[:, i : i + (h - 1) * stride + 1 : stride, j : j + (w - 1) * stride + 1 : stride]
                for i in range(kernel)
                for j in range(kernel)
            ],
            dim=3,
        ).view(n * h * w, kernel * kernel * channels)
        ctx.save_for_backward(columns, weight)
        ctx.geometry = (padded.shape, h, w, stride)
        return (columns @ weight.reshape(out_channels, -1).T).view(n, h, w, out_channels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        columns, weight = ctx.saved_tensors
        shape, h, w, stride = ctx.geometry
        out_channels, kernel, _, channels = weight.shape
        grad = grads[0].reshape(-1, out_channels)
        grad_weight = (grad.T @ columns).view_as(weight)
        grad_columns = (grad @ weight.reshape(out_channels, -1)).view(shape[0], h, w, -1, channels)
        grad_padded = grad.new_zeros(shape)
        for tap in range(kernel * kernel):
            i, j = divmod(tap, kernel)
            grad_padded[:, i : i + (h - 1) * stride + 1 : stride, j : j + (w - 1) * stride + 1 : stride] += (
                grad_columns[:, :, :, tap]
            )
        return grad_padded, grad_weight, None


class _MatrixConv2d(nn.Conv2d):
    """A dense convolution that takes the matrix product where its output has few positions."""

    def forward(self, input: Tensor) -> Tensor:
        stride, pad, kernel = self.stride[0], int(self.padding[0]), self.kernel_size[0]
        side = (input.shape[2] + 2 * pad - kernel) // stride + 1
        if side * side > _FEW_POSITIONS or self.bias is not None:
            return super().forward(input)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        rows = F.pad(input.to(dtype).permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad))
        weight = self.weight.to(dtype).permute(0, 2, 3, 1).contiguous()
        out: Tensor = _ColumnProduct.apply(rows.contiguous(), weight, stride)
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
