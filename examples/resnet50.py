"""ResNet-50 v1.5 for ImageNet (batch 8, 224x224, half): every distinct convolution with what follows it.

The stem is a 7x7 convolution with stride 2; max pooling after it (no part of this module) leaves 56x56. Four stages
of bottleneck blocks follow: 1x1 to the stage's width, 3x3 (which has the stride in v1.5), 1x1 to four times the width
plus the shortcut. The first block of a stage projects its shortcut with a strided 1x1 convolution.

Batch normalization is folded into a scale and a bias for each channel. A convolution and what follows it are one
graph; of the 53 in the network 24 differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cudnn

import plancache

BATCH = 8
IMAGE_CHANNELS, IMAGE_SIZE = 3, 224
STEM_FILTERS = 64
EXPANSION = 4
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))  # blocks, width, stride of the first block

Shape = tuple[int, int, int, int, int]  # input channels, input height and width, filters, kernel, stride


def layers() -> Iterator[tuple[str, Shape]]:
    """All convolutions of the network in order: what follows each ("relu", "none" or "add_relu"), and its shape."""
    yield "relu", (IMAGE_CHANNELS, IMAGE_SIZE, STEM_FILTERS, 7, 2)
    channels, size = STEM_FILTERS, IMAGE_SIZE // 4
    for blocks, width, first_stride in STAGES:
        expanded = EXPANSION * width
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            if block == 0:
                yield "none", (channels, size, expanded, 1, stride)
            yield "relu", (channels, size, width, 1, 1)
            yield "relu", (width, size, width, 3, stride)
            channels, size = expanded, size // stride
            yield "add_relu", (width, size, expanded, 1, 1)


def _distinct(followed_by: str) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(shape for what, shape in layers() if what == followed_by))


def _graph(handle: Any) -> Any:
    return plancache.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )


def _channels_last(graph: Any, name: str, n: int, c: int, h: int, w: int) -> Any:
    return graph.tensor(dim=[n, c, h, w], stride=[h * w * c, 1, w * c, c], name=name)


def _conv_scale_bias(graph: Any, shape: Shape) -> tuple[tuple[Any, ...], Any]:
    """The input tensors (image, filter, scale, bias), and the normalized output."""
    channels, size, filters, kernel, stride = shape
    x = _channels_last(graph, "x", BATCH, channels, size, size)
    w = _channels_last(graph, "w", filters, channels, kernel, kernel)
    scale = _channels_last(graph, "scale", 1, filters, 1, 1)
    bias = _channels_last(graph, "bias", 1, filters, 1, 1)
    padding = kernel // 2
    y = graph.conv_fprop(x, w, padding=[padding, padding], stride=[stride, stride], dilation=[1, 1])
    return (x, w, scale, bias), graph.bias(graph.scale(y, scale), bias)


@plancache.cached(cases=_distinct("relu"))
def conv_scale_bias_relu(handle: Any, channels: int, size: int, filters: int, kernel: int, stride: int) -> Any:
    """The stem, and the first two convolutions of a bottleneck."""
    graph = _graph(handle)
    inputs, y = _conv_scale_bias(graph, (channels, size, filters, kernel, stride))
    y = graph.relu(y)
    y.set_output(True)
    return graph, (*inputs, y)


@plancache.cached(cases=_distinct("none"))
def conv_scale_bias(handle: Any, channels: int, size: int, filters: int, kernel: int, stride: int) -> Any:
    """The projection of the shortcut in the first block of a stage."""
    graph = _graph(handle)
    inputs, y = _conv_scale_bias(graph, (channels, size, filters, kernel, stride))
    y.set_output(True)
    return graph, (*inputs, y)


@plancache.cached(cases=_distinct("add_relu"))
def conv_scale_bias_add_relu(handle: Any, channels: int, size: int, filters: int, kernel: int, stride: int) -> Any:
    """The last convolution of a bottleneck: the shortcut is added before ReLU."""
    graph = _graph(handle)
    inputs, y = _conv_scale_bias(graph, (channels, size, filters, kernel, stride))
    shortcut = _channels_last(graph, "shortcut", BATCH, filters, size // stride, size // stride)
    y = graph.relu(graph.add(y, shortcut))
    y.set_output(True)
    return graph, (*inputs, shortcut, y)
