"""Multipart uploads that a killed process left open on an S3 store: they cost room, and no list of objects shows them.

The client that everything else is done with has no call for them, so these two requests are signed here, with the keys
of the store's secret. Without such keys they are left to a lifecycle rule of the bucket (docs/object-stores.md). They
are waste and nothing more: a store that doesn't list them fails nobody.
"""

import hashlib
import hmac
import http.client
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from grpo_api.stores import ObjectStoreSpec

from .base import REGION

SECONDS = 30.0
"""Longest wait for an answer."""
ROUNDS = 10
"""Lists of up to 1000 uploads that are gone through at a time."""
_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Multiparts:
    """The open multipart uploads of a folder of a bucket."""

    bucket: str
    """URL of the bucket, with its name in the path."""
    folder: str
    """Keys that are meant begin with it."""
    region: str
    settings: Mapping[str, str]
    """AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, with temporary keys, AWS_SESSION_TOKEN."""

    def abort(self, left: Callable[[str], bool]) -> None:
        """Abort those of the keys, relative to the folder, that are `left`."""
        try:
            for _ in range(ROUNDS):
                found = [(key, upload) for key, upload in self._open() if left(key.removeprefix(self.folder))]
                if not found:
                    return
                for key, upload in found:
                    self.ask("DELETE", f"/{key}", {"uploadId": upload})
        except (OSError, http.client.HTTPException, ElementTree.ParseError) as error:
            print(f"{self.bucket}: open multipart uploads are not collected: {error}", flush=True)

    def _open(self) -> list[tuple[str, str]]:
        """Key and id of open uploads."""
        root = ElementTree.fromstring(self.ask("GET", "", {"prefix": self.folder, "uploads": ""}))
        listed = root.iterfind("{*}Upload")
        return [(one.findtext("{*}Key") or "", one.findtext("{*}UploadId") or "") for one in listed]

    def ask(self, method: str, path: str, query: Mapping[str, str]) -> bytes:
        """The answer to a request without a body.

        Raises:
            OSError: none came, or a refusal. HTTPException: it broke off.
        """
        url = urlsplit(self.bucket + quote(path))
        asked = urlencode(sorted(query.items()), quote_via=quote)
        headers = self._signed(method, url.netloc, url.path, asked)
        request = urllib.request.Request(
            f"{url.scheme}://{url.netloc}{url.path}?{asked}", method=method, headers=headers
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            found: bytes = answer.read()
            return found

    def _signed(self, method: str, host: str, path: str, query: str) -> dict[str, str]:
        """The headers of a request, by AWS Signature Version 4 (Amazon S3 API Reference, "Authenticating Requests")."""
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": now}
        if token := self.settings.get("AWS_SESSION_TOKEN"):
            headers["x-amz-security-token"] = token
        names, lines = ";".join(headers), "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = "\n".join((method, path, query, lines, names, _NOTHING))
        scope = f"{now[:8]}/{self.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.settings['AWS_SECRET_ACCESS_KEY']}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        credential = f"{self.settings['AWS_ACCESS_KEY_ID']}/{scope}"
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def multiparts_of(spec: ObjectStoreSpec, settings: Mapping[str, str], folder: str) -> Multiparts | None:
    """The open uploads of a folder below the spec's URL; None where they can't be asked for."""
    if not spec.url.startswith("s3://") or not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= settings.keys():
        return None
    bucket, _, above = spec.url.removeprefix("s3://").partition("/")
    region = spec.region or REGION
    endpoint = (spec.endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
    return Multiparts(f"{endpoint}/{bucket}", "/".join(filter(None, (above, folder))) + "/", region, settings)
