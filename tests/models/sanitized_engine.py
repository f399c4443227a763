"""Trains and evaluates networks that hypothesis draws, with a library that was built with sanitizers.

An access outside an array, or undefined behaviour, ends the process with a report on stderr.

    LD_PRELOAD=$(cc -print-file-name=libasan.so) python tests/models/sanitized_engine.py LIBRARY EXAMPLES

"fault" in place of EXAMPLES writes where nothing may be written, to show that it is noticed.
"""

import ctypes
import sys
from itertools import pairwise
from math import prod
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fedcluster.models.kernels.library import open_library
from fedcluster.models.kernels.structures import Block, NetworkSpec, Samples

CROPS = st.sampled_from([0, 0, 5])
SHAPES = st.tuples(st.integers(1, 9), st.integers(4, 13), st.integers(4, 13))
BLOCKS = st.lists(
    st.builds(
        lambda channels, form, *pooling: Block(channels, *form, *pooling),
        st.sampled_from([1, 3, 8, 9, 16, 25, 64]),  # 64: pixels are moved apart
        st.sampled_from([(3, 1), (5, 2), (3, 0), (5, 0), (5, 1)]),  # kernel, padding
        st.sampled_from([2, 3]),
        st.booleans(),
    ),
    max_size=2,
)
SIZES = st.lists(st.integers(1, 40) | st.just(512), min_size=2, max_size=4)  # 512: rows are moved apart


def parameters(sizes: list[int], blocks: list[Block], channels: int) -> int:
    count = sum(i * o + o for i, o in pairwise(sizes))
    for block in blocks:
        count += block.out_channels * (channels * block.kernel**2 + 1)
        channels = block.out_channels
    return count


def train_and_evaluate(
    library: Any,
    sizes: list[int],
    blocks: list[Block],
    shape: tuple[int, int, int],
    crop: int,
    batch: int,
    as_bytes: bool,
    with_offset: bool,
) -> None:
    features = shape[0], *(min(size, crop or size) for size in shape[1:])
    for block in blocks:
        features = block.out_channels, block.pooled(features[1]), block.pooled(features[2])
        assume(min(features) > 0)
    sizes = [prod(features), *sizes[1:]]
    spec = NetworkSpec(sizes, blocks, shape, crop)
    x = torch.randint(256, (5, *shape)).to(torch.uint8) if as_bytes else torch.randn(5, *shape)
    y, channels = torch.randint(sizes[-1], (5,)), shape[0]
    scale, shift = (torch.full((channels,), 0.01), torch.full((channels,), -1.0)) if as_bytes else (None, None)
    samples, rows = Samples(x, y, scale, shift), torch.randint(5, (2, batch))
    w = torch.randn(parameters(sizes, blocks, channels)) * 0.1
    offset, gradient = torch.randn(len(w)) * 0.01, torch.empty(len(w))

    def workspace(training: bool, with_offset: bool = False) -> torch.Tensor:
        return torch.full((library.workspace_size(spec, batch, training, with_offset),), float("nan"))

    first, second, third = workspace(True, with_offset), workspace(True), workspace(False)
    step_offset = offset.data_ptr() if with_offset else None
    status = library.sgd(w.data_ptr(), step_offset, spec, samples, rows.data_ptr(), 2, batch, 0.05, first.data_ptr())
    status |= library.compute_gradient(
        w.data_ptr(), gradient.data_ptr(), spec, samples, rows.data_ptr(), batch, second.data_ptr()
    )
    losses, correct = torch.empty(3, dtype=torch.float64), torch.empty(3, dtype=torch.int64)
    several = torch.randint(5, (2 * batch + 1,))
    status |= library.evaluate(
        w.data_ptr(),
        spec,
        samples,
        several.data_ptr(),
        len(several),
        batch,
        losses.data_ptr(),
        correct.data_ptr(),
        third.data_ptr(),
    )
    assert status == 0
    assert torch.isfinite(w).all(), "memory was read before it was written"
    assert torch.isfinite(gradient).all()
    assert 0 <= correct[:-1].min() <= correct.max() <= batch

    rows[1, -1] = 5
    refused = w.clone()
    arguments = spec, samples, rows.data_ptr(), 2, batch, 0.05, first.data_ptr()
    assert library.sgd(w.data_ptr(), None, *arguments) == 1
    rows[1, -1], y[3] = 3, sizes[-1]
    assert library.sgd(w.data_ptr(), None, *arguments) == 2
    assert torch.equal(w, refused)


def write_over_a_red_zone(library: Any) -> None:
    """What a write beyond an array of the workspace does."""
    spec, samples = NetworkSpec([6, 4, 3], [], ()), Samples(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    w, rows = torch.zeros(6 * 4 + 4 + 4 * 3 + 3), torch.zeros(1, 5, dtype=torch.int64)
    workspace = torch.zeros(library.workspace_size(spec, 5, True, False))
    library.sgd(w.data_ptr(), None, spec, samples, rows.data_ptr(), 1, 5, 0.1, workspace.data_ptr())
    ctypes.memset(workspace.data_ptr(), 0, 4 * workspace.numel())


def check_networks(library: Any, examples: int) -> None:
    drawn_so_far = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        sizes=SIZES,
        blocks=BLOCKS,
        shape=SHAPES,
        crop=CROPS,
        batch=st.integers(1, 9),
        as_bytes=st.booleans(),
        with_offset=st.booleans(),
    )
    def check(blocks: list[Block], crop: int, **drawn: Any) -> None:
        nonlocal drawn_so_far
        train_and_evaluate(library, blocks=blocks, crop=crop if blocks else 0, **drawn)
        drawn_so_far += 1

    check()
    for n in (0, 1, 31, 4097):
        v, total = torch.randn(n), torch.zeros(n, dtype=torch.float64)
        library.all_finite(v.data_ptr(), n)
        library.sum_of_squares(v.data_ptr(), v.data_ptr(), n)
        library.add_rounded(total.data_ptr(), v.data_ptr(), n, 0.5, 6144.0)
    print(f"{drawn_so_far} networks")


if __name__ == "__main__":
    path, what = sys.argv[1:]
    if what.isdecimal():
        check_networks(open_library(path), int(what))
    else:
        write_over_a_red_zone(open_library(path))
