"""API keys: how they are made, what is kept of them, and how one is recognised.

A key is 256 random bits, so what is kept is its plain SHA-256: nobody can try so many keys, and a
slow hash, as for passwords that people choose, would only let strangers burn our time. A request's
key is hashed, its hash is looked up, and the two hashes are compared in constant time; what a
look-up's time could tell is about hashes, which lead back to no key.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping

PREFIX = "sha256:"
_HASH = re.compile(PREFIX + "[0-9a-f]{64}")


def new_key() -> str:
    """A key that nobody has had."""
    return f"sk-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """What a file has in place of a key."""
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def is_hash(text: str) -> bool:
    """Whether it is the hash of some key."""
    return _HASH.fullmatch(text) is not None


class KeyRing:
    """Hashes of keys, and whose they are."""

    def __init__(self, hashes: Mapping[str, Iterable[str]]) -> None:
        """``hashes``: by whose they are."""
        self._owners = {one: (one, owner) for owner, many in hashes.items() for one in many}

    def owner(self, key: str) -> str | None:
        """Whose key it is; ``None`` for nobody's."""
        given = hash_of(key)
        known, owner = self._owners.get(given, (hash_of(""), None))
        return owner if hmac.compare_digest(known, given) else None


def bearer(authorization: str) -> str:
    """The key in an ``Authorization`` header; empty without one."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
