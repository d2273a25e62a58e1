"""Ed25519 signatures of bundles, with keys as OpenSSL or OpenSSH write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..foreign import read_file, show_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

LARGEST = 2**16  # bytes of a key file
MAKE = "make one with: ssh-keygen -t ed25519 -N '' -f KEY"


def sign(content: bytes, key: Path | str) -> bytes:
    """The signature of these bytes by the private key in a file."""
    return read_private_key(key).sign(content)


def verify(content: bytes, signature: bytes, key: Path | str) -> bool:
    """Whether it is the signature of these bytes by the owner of the public key in a file."""
    from cryptography.exceptions import InvalidSignature

    public = read_public_key(key)
    try:
        public.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def read_private_key(path: Path | str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    key = _read_key(path, "private", load_pem_private_key, load_ssh_private_key, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{show_path(path)} is no Ed25519 private key; {MAKE}.")
    return key


def read_public_key(path: Path | str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    key = _read_key(path, "public", load_pem_public_key, load_ssh_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{show_path(path)} is no Ed25519 public key; {MAKE}.")
    return key


def _read_key(path: Path | str, kind: str, *loaders: Callable[..., Any], **options: Any) -> Any:
    """The key in a file that one of the loaders can read."""
    try:
        content = read_file(Path(path), LARGEST)
    except OSError as error:
        raise InputError(f"{show_path(path)} cannot be read ({error.strerror}); name the file of a key.") from None
    for load in loaders:
        try:
            return load(content, **options)
        except TypeError:  # it asks for a password
            raise InputError(f"{show_path(path)} is encrypted; give a key without a passphrase.") from None
        except Exception:  # not of this format, or damaged: the libraries raise many kinds
            continue
    raise InputError(f"{show_path(path)} is no {kind} key that can be read; {MAKE}.")
