"""Memory that stays: one setting of the C library that makes training with large activations much faster."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt in glibc's malloc.h
LARGE = 2**30


def keep_memory() -> None:
    """Let freed blocks of any size be used again.

    glibc gives every large block back to the system when it is freed, so that each step of training pays anew for
    the pages of its activations: a convolution over MNIST takes eight times as long as its arithmetic. It holds for
    the whole process and cannot be taken back; what it costs is that memory once used is kept for the next block.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and does not need it
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, LARGE)
            mallopt(TRIM_THRESHOLD, LARGE)
