"""What clients answer in the stages of SecAgg+, checked before Flower's workflow reads it, which trusts all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from torch import Tensor

from ... import foreign
from ...text import flatten

LONGEST = 2**14  # bytes of an encrypted share


class Checks:
    """Of one round, in which the server sent these leaves."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        # a client sends how much it counts, and then the leaves in the order of their names
        self._shapes = [(1,), *(tuple(np.atleast_1d(leaves[name]).shape) for name in sorted(leaves))]
        self._keys: set[bytes] = set()

    def find_fault(self, asked: Message, reply: Message) -> str | None:
        """Why a reply cannot be used; None if it can."""
        checks: dict[object, Callable[[ConfigRecord, Any], None]] = {
            Stage.SETUP: self._check_keys,
            Stage.SHARE_KEYS: _check_shares,
            Stage.COLLECT_MASKED_VECTORS: self._check_masked,
            Stage.UNMASK: _check_revealed,
        }
        try:
            question = asked.content.config_records[RECORD_KEY_CONFIGS]
            checks[question[Key.STAGE]](question, reply.content.config_records[RECORD_KEY_CONFIGS])
            if question[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
                rows: object = recorddict_to_fitres(reply.content, keep_input=True).num_examples
                if not isinstance(rows, int):
                    raise TypeError("rows that are no number")
        except Exception as error:  # whatever foreign bytes make of the libraries that read them
            return f"its part of secure aggregation cannot be used ({flatten(f'{type(error).__name__}: {error}', 200)})"
        return None

    def _check_keys(self, question: ConfigRecord, answer: Any) -> None:
        keys = [answer[Key.PUBLIC_KEY_1], answer[Key.PUBLIC_KEY_2]]
        for key in map(load_pem_public_key, keys):
            if not isinstance(key, EllipticCurvePublicKey) or key.curve.name != SECP384R1.name:
                raise ValueError("a key of another kind")
        if len({*keys} - self._keys) < len(keys):
            raise ValueError("a key that is there already")
        self._keys |= {*keys}

    def _check_masked(self, question: ConfigRecord, answer: Any) -> None:
        arrays = answer[Key.MASKED_PARAMETERS]
        found = [foreign.read_npy_header("an array", array) for array in arrays]
        if [header.shape for header in found] != self._shapes or any(each.dtype != np.int64 for each in found):
            raise ValueError("arrays of other shapes or types than asked for")


def _check_shares(question: ConfigRecord, answer: Any) -> None:
    """Encrypted shares of its keys, one for each neighbour whose key it was sent but itself."""
    given, shares = answer[Key.DESTINATION_LIST], answer[Key.CIPHERTEXT_LIST]
    neighbours = {int(name) for name in question if name != Key.STAGE}
    if len(given) != len({*given}) or not {*given} < neighbours or len(given) != len(neighbours) - 1:
        raise ValueError("shares for other clients than asked for")
    if len(shares) != len(given) or not all(isinstance(each, bytes) and len(each) <= LONGEST for each in shares):
        raise ValueError("shares that are none")


def _check_revealed(question: ConfigRecord, answer: Any) -> None:
    """The shares of others that it holds, in the order that was asked for."""
    wanted: Any = [*question[Key.ACTIVE_NODE_ID_LIST], *question[Key.DEAD_NODE_ID_LIST]]  # type: ignore[misc]
    shares = answer[Key.SHARE_LIST]
    if list(answer[Key.NODE_ID_LIST]) != wanted or len(shares) != len(wanted):
        raise ValueError("shares of other clients than asked for")
    if not all(isinstance(each, bytes) and len(each) <= LONGEST for each in shares):
        raise ValueError("shares that are none")
