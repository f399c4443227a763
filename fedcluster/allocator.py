"""A setting of glibc's allocator that makes training with large activations much faster."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt in glibc's malloc.h
LARGE = 2**30


def keep_memory() -> None:
    """Let freed blocks of any size be reused.

    By default glibc returns every large block to the system when it is freed, and each training step pays for the pages
    of its activations again: a convolution over MNIST takes eight times as long as its arithmetic. The setting holds
    for the whole process and cannot be undone; its cost is that freed memory is not returned to the system.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and does not need it
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, LARGE)
            mallopt(TRIM_THRESHOLD, LARGE)
