"""Keys, masks and encrypted shares, all from `cryptography`.

Every key is derived by HKDF from what it is used for, and is used once. So the counter and the nonces can begin at 0.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

KEY = 16  # bytes of a key of AES-128
CHUNK = 2**16  # numbers of a mask that are made at a time: half a megabyte stays in the cache
NONCE = bytes(12)

Words = NDArray[np.uint64]


def derive(secret: bytes, *purpose: bytes, length: int = KEY) -> bytes:
    """A key for one purpose."""
    info = b"".join(len(part).to_bytes(4) + part for part in (b"fedcluster secure aggregation", *purpose))
    return HKDF(SHA256(), length, salt=None, info=info).derive(secret)


def commitment(secret: bytes) -> bytes:
    return hashlib.sha256(b"fedcluster commitment" + secret).digest()


def private_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(seed, b"private key", length=32))


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret that two devices share, from the private key of one and the public key of the other."""
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def usable(public: bytes) -> bool:
    """Whether a public key is not one of the few with which every secret is 0."""
    try:
        agree(X25519PrivateKey.generate(), public)
    except ValueError:
        return False
    return True


def add_masks(total: Words, masks: Iterable[tuple[bytes, int]]) -> None:
    """total += sign * G(key)    mod 2^64, for every key and sign: all masks of one part, then those of the next."""
    signed = list(masks)
    zeros, made = memoryview(bytes(8 * CHUNK)), bytearray(8 * CHUNK + 15)
    for start in range(0, len(total), CHUNK):
        part = total[start : start + CHUNK]
        counter = modes.CTR((8 * start // 16).to_bytes(16))  # of blocks of 16 bytes
        mask = np.frombuffer(made, "<u8", len(part))
        for key, sign in signed:
            Cipher(algorithms.AES(key), counter).encryptor().update_into(zeros[: 8 * len(part)], made)
            if sign > 0:
                part += mask
            else:
                part -= mask


def encrypt(key: bytes, text: bytes, about: bytes) -> bytes:
    return AESGCM(key).encrypt(NONCE, text, about)


def decrypt(key: bytes, text: bytes, about: bytes) -> bytes | None:
    """None if the text was not encrypted with this key about this."""
    try:
        return AESGCM(key).decrypt(NONCE, text, about)
    except (InvalidTag, ValueError):
        return None
