"""Certificates for a federation: an authority, a certificate for the server, and a key for every device.

    ca.crt                 for every device, which verifies the server with it
    server.crt, server.key for the server only
    devices/ID.pub         for the server, which authenticates device ID with it
    devices/ID.key         for device ID only; the server does not need it

The authority's own key signs once and is not stored: a new server certificate needs a new authority.
"""

import ipaddress
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedcluster.errors import BadData
from fedcluster.flower.registry import DEVICE_ID

CURVE = ec.SECP384R1()
VALID = timedelta(days=365)


def make(folder: Path, nodes: int, hosts: list[str]) -> None:
    """All files for a federation of devices 0 to `nodes` - 1, whose server has the names and addresses `hosts`."""
    if folder.exists() and any(folder.iterdir()):
        raise BadData(f"{folder} is not empty: keys are not overwritten: choose a new folder")
    (folder / "devices").mkdir(parents=True)
    authority = ec.generate_private_key(CURVE)
    ca = certificate("fedcluster development authority", authority.public_key(), authority, issuer=None)
    key = ec.generate_private_key(CURVE)
    server = certificate("fedcluster server", key.public_key(), authority, issuer=ca, hosts=hosts)
    write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    write(folder / "server.crt", server.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    write(folder / "server.key", key.private_bytes(pem, pkcs8, serialization.NoEncryption()), secret=True)
    for name in map(str, range(nodes)):
        add_device(folder, name)


def add_device(folder: Path, name: str) -> None:
    """A key pair for one device, in the formats of flower-supernode and `flwr supernode register`."""
    key = ec.generate_private_key(CURVE)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    write(folder / f"devices/{name}.key", key.private_bytes(pem, form, serialization.NoEncryption()), secret=True)
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    write(folder / f"devices/{name}.pub", key.public_key().public_bytes(*openssh) + b"\n")


def certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    hosts: list[str] | None = None,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    usage = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
    )
    signs = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + VALID)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not signs, key_encipherment=False, key_cert_sign=signs, crl_sign=signs, **usage
            ),
            critical=True,
        )
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([alternative(h) for h in hosts]), critical=False)
    return builder.sign(authority, hashes.SHA256())


def alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a new file; a secret one is never readable by others, not even while it is written."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def public_keys(folder: Path) -> dict[bytes, str]:
    """The devices' ids by their public keys, which are in the form in which Flower compares them."""
    keys: dict[bytes, str] = {}
    for path in sorted((folder / "devices").glob("*.pub")):
        if not DEVICE_ID.fullmatch(path.stem):
            raise BadData(f"{path}: a device id has letters, digits and ._- only")
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadData(f"{path} is not a public key ({error}); fedcluster certificates makes key pairs") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise BadData(f"{path} is not an elliptic-curve key: make one with ssh-keygen -t ecdsa -b 384")
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        if pem in keys:
            raise BadData(f"{path} is also the key of device {keys[pem]}: every device needs its own")
        keys[pem] = path.stem
    if not keys:
        raise BadData(f"{folder}/devices has no public keys (ID.pub): fedcluster certificates {folder} makes them")
    return keys


def verify_by(keys: dict[bytes, str]) -> Callable[[str, bytes, bytes], bool]:
    """Whether (device, message, signature) is that device's signature of this message, by these public keys."""
    pems = {device: pem for pem, device in keys.items()}

    @cache
    def load(device: str) -> ec.EllipticCurvePublicKey | None:
        key = serialization.load_pem_public_key(pems[device]) if device in pems else None
        return key if isinstance(key, ec.EllipticCurvePublicKey) else None

    def verify(device: str, message: bytes, signature: bytes) -> bool:
        key = load(device)
        if key is None:
            return False
        try:
            key.verify(signature, message, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            return False
        return True

    return verify


def sign_with(key: ec.EllipticCurvePrivateKey) -> Callable[[bytes], bytes]:
    return lambda message: key.sign(message, ec.ECDSA(hashes.SHA384()))


def check_server(folder: Path) -> None:
    """Check the server's files as its devices and its proxy will: the key is private and belongs to the certificate,
    which is signed by the authority, valid now, and names 127.0.0.1, where the proxy reaches the SuperLink."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        check_secret(folder / "server.key")
        server.load_cert_chain(folder / "server.crt", folder / "server.key")
    except ssl.SSLError as error:
        raise BadData(
            f"{folder}: server.crt and server.key are not a certificate and its key ({error.reason})"
        ) from None
    except OSError as error:
        raise BadData(
            f"{error.filename or folder / 'server.crt'}: {error.strerror}; fedcluster certificates makes all of them"
        ) from None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        trust(folder / "ca.crt").wrap_bio(down, up, server_hostname="127.0.0.1"),
        server.wrap_bio(up, down, server_side=True),
    )
    try:
        for side in 2 * sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise BadData(
            f"{folder}/server.crt does not fit ({error.verify_message}): it must be signed by ca.crt, be valid now, "
            "and name 127.0.0.1 besides the addresses that devices use"
        ) from None


def trust(authority: Path) -> ssl.SSLContext:
    """A TLS context for clients, which trusts this authority alone."""
    try:
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise BadData(f"{authority} is not a certificate ({error.reason})") from None
    except OSError as error:
        raise BadData(f"{authority}: {error.strerror}; copy the ca.crt of the server") from None


def check_secret(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise BadData(f"{path} can be read by others: chmod 600 {path}")


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        check_secret(path)
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}; a device needs the key that was made for it") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadData(f"{path} is not a private key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadData(f"{path} is not an elliptic-curve key: make one with ssh-keygen -t ecdsa -b 384")
    return key
