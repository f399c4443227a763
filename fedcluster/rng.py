"""All randomness, as a pure function of where it is used.

No generator is kept between uses, so there is no generator state to save, and neither the number of workers nor the
order in which they work can change a draw.
"""

from hashlib import blake2b

from numpy.random import Generator, Philox


def stream(seed: int, role: str, round: int = 0, cycle: int = 0, device: int = 0) -> Generator:
    """The random stream for one use: Philox keyed by a digest of (seed, role, round, cycle, device)."""
    place = f"{seed}/{role}/{round}/{cycle}/{device}".encode()
    return Generator(Philox(key=int.from_bytes(blake2b(place, digest_size=16).digest(), "little")))


def torch_seed(seed: int, role: str, round: int = 0, cycle: int = 0, device: int = 0) -> int:
    """A seed for torch's own generator, from the same stream: initial weights, dropout."""
    return int(stream(seed, role, round, cycle, device).integers(2**63))
