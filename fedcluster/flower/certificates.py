"""Certificates for a federation: an authority, a certificate of the server, and a key for every device.

    ca.crt                 give it to every device: it proves the server
    server.crt, server.key stay with the server
    devices/ID.pub         stays with the server: whose key is whose
    devices/ID.key         give it to device ID, and to nobody else; the server does not need it

The authority's own key signs once and is not kept: a new server certificate is a new authority.
"""

import ipaddress
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedcluster.errors import BadData
from fedcluster.flower.registry import NAME

CURVE = ec.SECP384R1()
VALID = timedelta(days=365)


def make(folder: Path, nodes: int, hosts: list[str]) -> None:
    """Everything for a federation of `nodes` devices named 0, 1, 2, ..., whose server is reached as one of `hosts`."""
    if folder.exists() and any(folder.iterdir()):
        raise BadData(f"{folder} is not empty: keys are not overwritten, choose a new folder")
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
    """A key pair for one device, as flower-supernode and `flwr supernode register` read them."""
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
    """A private key is for its owner's eyes from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def public_keys(folder: Path) -> dict[bytes, str]:
    """Whose key is whose, by the key in the form in which Flower compares them."""
    keys: dict[bytes, str] = {}
    for path in sorted((folder / "devices").glob("*.pub")):
        if not NAME.fullmatch(path.stem):
            raise BadData(f"{path}: the name of a device is made of letters, digits and ._-")
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadData(f"{path} is not a public key ({error}); fedcluster certificates makes them") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise BadData(f"{path} is not an elliptic-curve key: make one with ssh-keygen -t ecdsa -b 384")
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        if pem in keys:
            raise BadData(f"{path} is the key of device {keys[pem]} too: every device needs its own")
        keys[pem] = path.stem
    if not keys:
        raise BadData(f"{folder}/devices has no public keys (ID.pub): fedcluster certificates {folder} makes them")
    return keys


def check_server(folder: Path) -> None:
    """That the server's certificate and key are there, belong together, and that nobody else can read the key."""
    try:
        check_secret(folder / "server.key")
        (folder / "ca.crt").read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "server.crt", folder / "server.key")
    except ssl.SSLError as error:
        raise BadData(
            f"{folder}: server.crt and server.key are not a certificate and its key ({error.reason})"
        ) from None
    except OSError as error:
        raise BadData(
            f"{error.filename or folder / 'server.crt'}: {error.strerror}; fedcluster certificates makes all of them"
        ) from None


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
