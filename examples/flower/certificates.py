"""Make a certificate authority, a certificate of the server, and a pair of keys for each node.

python examples/flower/certificates.py FOLDER [--host NAME_OR_ADDRESS ...] [--nodes NAME ...]

Files that are there are kept, so that nodes can be added later. `server.key` and `server.pem` are kept if both are
there, whatever --host says; delete them to make new ones. Private files can be read by their owner alone.
`ca.key` signs certificates: keep it off the server and the nodes.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

YEARS_OF_AUTHORITY, DAYS_OF_SERVER = 10, 825
AUTHORITY = "federation authority"
HERE = ["localhost", "127.0.0.1", "::1"]


def write(path: Path, content: bytes, private: bool = False) -> None:
    """Whole or not at all, and never readable by others in between."""
    begun = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    begun.replace(path)
    print(path)


def say_key(key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def make_certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, issuer: str, days: int
) -> x509.CertificateBuilder:
    def say(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(say(name))
        .issuer_name(say(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def say_usage(**what: bool) -> x509.KeyUsage:
    every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: what.get(name, False) for name in every})


def make_authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    place = folder / "ca.key"
    if place.exists():
        found = serialization.load_pem_private_key(place.read_bytes(), None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            sys.exit(f"{place} is not a key that this script made.")
        return found
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        make_certificate(AUTHORITY, key, key, AUTHORITY, 365 * YEARS_OF_AUTHORITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(say_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write(folder / "ca.crt", made.public_bytes(serialization.Encoding.PEM))
    write(place, say_key(key, serialization.PrivateFormat.PKCS8), private=True)  # last: if it is there, all is
    return key


def make_server(folder: Path, authority: ec.EllipticCurvePrivateKey, hosts: list[str]) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        make_certificate(hosts[0], key, authority, AUTHORITY, DAYS_OF_SERVER)
        .add_extension(x509.SubjectAlternativeName([say_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(say_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA256())
    )
    write(folder / "server.key", say_key(key, serialization.PrivateFormat.PKCS8), private=True)
    write(folder / "server.pem", made.public_bytes(serialization.Encoding.PEM))


def say_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_node(folder: Path, name: str) -> None:
    """A key that Flower knows nodes by."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write(folder / f"{name}.pub", public + b"\n")
    write(folder / name, say_key(key, serialization.PrivateFormat.OpenSSH), private=True)  # last: see above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", nargs="+", default=[], help="names or addresses of the server, beside this machine's")
    parser.add_argument("--nodes", nargs="+", default=[], help="a name for each node")
    given = parser.parse_args()
    if wrong := [name for name in given.nodes if not name.replace("-", "").replace("_", "").isalnum()]:
        sys.exit(f"a node's name has letters, digits, - and _, unlike {wrong[0]!r}.")
    given.folder.mkdir(parents=True, exist_ok=True)
    authority = make_authority(given.folder)
    if not all((given.folder / name).exists() for name in ("server.key", "server.pem")):
        make_server(given.folder, authority, [*given.host, *HERE])
    for name in given.nodes:
        if not (given.folder / name).exists():
            make_node(given.folder, name)


if __name__ == "__main__":
    main()
