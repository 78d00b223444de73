"""An issuer of tokens for tests: its keys, and what it signs with them."""

from __future__ import annotations

import json
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "kafka"
NOW_S: Final = 1_700_000_000


class Issuer:
    """Has a key of each kind, by its name."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {}
        self.add("rsa", "RS256")
        self.add("ec", "ES256")
        self.add("ed", "EdDSA")

    def add(self, key_id: str, algorithm: str, *, rsa_bits: int = 2_048) -> None:
        """Make a key."""
        if algorithm.startswith("ES"):
            key: Any = ec.generate_private_key(ec.SECP256R1())
        elif algorithm == "EdDSA":
            key = ed25519.Ed25519PrivateKey.generate()
        else:
            key = rsa.generate_private_key(65_537, rsa_bits)
        self.keys[key_id] = algorithm, key

    def row(self, key_id: str, **more: Any) -> dict[str, Any]:
        """A key's public half, as a JWK."""
        algorithm, key = self.keys[key_id]
        converted: Any = get_default_algorithms()[algorithm]
        row = json.loads(converted.to_jwk(key.public_key()))
        row.pop("key_ops", None)
        return {**row, "kid": key_id, **more}

    def jwks(self, *key_ids: str) -> bytes:
        """The set of these keys, or of all."""
        rows = [self.row(key_id) for key_id in key_ids or self.keys]
        return json.dumps({"keys": rows}).encode()

    def token(
        self,
        user: Any = "alice",
        *,
        key_id: str = "rsa",
        now_s: float = NOW_S,
        lives_s: float = 300,
        algorithm: str | None = None,
        header: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """A token; a claim that is None is left out."""
        own, key = self.keys[key_id]
        said = {
            "sub": user,
            "iss": ISSUER,
            "aud": AUDIENCE,
            "iat": int(now_s),
            "exp": int(now_s + lives_s),
            **claims,
        }
        said = {name: value for name, value in said.items() if value is not None}
        headers = {"kid": key_id, **(header or {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        return jwt.encode(said, key, algorithm or own, headers=headers)


def message(token: str, *, identity: str = "", **extensions: str) -> bytes:
    """A client's first message."""
    said = f"a={identity}" if identity else ""
    pairs = "".join(f"\x01{key}={value}" for key, value in extensions.items())
    return f"n,{said},\x01auth=Bearer {token}{pairs}\x01\x01".encode()
