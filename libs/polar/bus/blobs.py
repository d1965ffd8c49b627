"""The blob store: what is too large for a record, addressed by its hash.

`put` is idempotent, since the same bytes have the same place, and a claim is written only after its bytes are. `get`
gives exactly the bytes that were put, or an error. Folder, S3, GCS or Azure by URL; knows nothing of Kafka.
"""

from __future__ import annotations

import asyncio
import hashlib

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from polar.schemas.base import Claim

from .errors import BlobWrong, BusError

HASH_IN_THREAD = 1024 * 1024
"""Bytes from which hashing (about 1 ms per MiB) leaves the loop."""


class BlobStore:
    """Bytes by their SHA-256."""

    def __init__(self, url: str) -> None:
        """`url`: `file:///folder` (made where missing), `s3://bucket/path`, `gs://…`, `az://…`, `memory:///`.

        Raises:
            BusError: no such kind of store, or the folder cannot be made.
        """
        self.url = url
        try:
            self._store = from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        except (BaseError, ValueError, OSError) as error:
            raise BusError(
                f"cannot use the blob store {url} (POLAR_KAFKA_BLOB_URL): {error}", retryable=False
            ) from error

    async def put(self, data: bytes, content_type: str = "application/octet-stream") -> Claim:
        """Stores `data` and returns its claim.

        Raises:
            BusError: the store did not take it; retryable.
        """
        digest = await _sha256(data)
        path = _path(digest)
        try:
            await obstore.put_async(self._store, path, data)
        except (BaseError, OSError) as error:
            raise BusError(f"the blob store {self.url} did not take {len(data)} bytes: {error}") from error
        return Claim(sha256=digest, size=len(data), uri=path, content_type=content_type)

    async def get(self, claim: Claim) -> bytes:
        """The bytes of a claim.

        Raises:
            BlobWrong: they are missing, or are not those that were put.
            BusError: the store did not answer; retryable.
        """
        if claim.uri != _path(claim.sha256):
            # a claim may come from outside (`polar.tasks`); it names a hash, never a place of its writer's choice
            raise BlobWrong(f"claim {claim.sha256} points elsewhere: {claim.uri!r}")
        try:
            found = await obstore.get_async(self._store, claim.uri)
            data = bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError):
            raise BlobWrong(f"claim {claim.sha256} ({claim.size} bytes) is not in the blob store {self.url}") from None
        except (BaseError, OSError) as error:
            raise BusError(f"the blob store {self.url} did not give {claim.sha256}: {error}") from error
        if len(data) != claim.size or await _sha256(data) != claim.sha256:
            raise BlobWrong(
                f"the bytes of claim {claim.sha256} in the blob store {self.url} are not those that were put"
            )
        return data


def _path(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BlobWrong(f"{digest!r} is no SHA-256")
    return f"sha256/{digest[:2]}/{digest}"


async def _sha256(data: bytes) -> str:
    if len(data) < HASH_IN_THREAD:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
