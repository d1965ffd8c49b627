"""The signature of a thinking block: what makes thinking come back so that it renders to the same prompt.

A client returns a block as it got it. Where it was shown the thinking, that is enough, and the signature is a mere
digest. Where it asked not to be shown it (`display: omitted`), the signature is the thinking itself, compressed: the
proxy keeps no conversation. Signatures of others hold nothing that can be read here. Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

SHOWN, OMITTED = "polar.shown.", "polar.kept."
MOST_BYTES = 16 * 1024 * 1024
"""Of thinking in one signature; a small body must not become a large one."""


def sign(thinking: str, *, omitted: bool) -> str:
    """The signature of `thinking`."""
    raw = thinking.encode("utf-8", "surrogatepass")
    if omitted:
        return OMITTED + base64.b64encode(zlib.compress(raw, 6)).decode()
    return SHOWN + base64.b64encode(hashlib.sha256(raw).digest()[:18]).decode()


def kept(signature: str) -> str | None:
    """The thinking that a signature holds; None where it holds none.

    Raises:
        ValueError: it begins as one of ours and is damaged.
    """
    if not signature.startswith(OMITTED):
        return None
    try:
        unpacking = zlib.decompressobj()
        raw = unpacking.decompress(base64.b64decode(signature.removeprefix(OMITTED), validate=True), MOST_BYTES)
        if not unpacking.eof:
            raise ValueError("it is cut short or too long")
        return raw.decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError("it is damaged") from error
