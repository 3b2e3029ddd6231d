"""Who may call the REST interface: token, `Host` and `Origin` of a request."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from strandline.errors import ConfigError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_TOKEN = re.compile(r"[\x21-\x7e]{8,200}")
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_READING = frozenset({"GET", "HEAD"})
_PRIVATE = re.compile(r"(?:/v1)?/jobs/[^/]+/(?:logs|processes|profile|flamegraph)(?:/|$)")
"""What needs the token even where reading is free: the logs lie in files that only their user may read."""
_PAGE = re.compile(r"/(?:[A-Za-z0-9._-]+/)*(?:[A-Za-z0-9._-]+\.(?:html|js|css|svg|png|ico|woff2|map|webmanifest))?")
"""The files of the page. They hold no facts, so everybody may load them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Access:
    """Decides which requests are answered.

    Attributes:
        token: The secret that changing calls must carry. `new_token` makes one.
        bind: The address at which the server listens.
        hosts: Further names under which clients reach the server, as those of a proxy.
        token_for_reads: Whether reading needs the token as well. It always does when `bind` is not a loopback address.
    """

    token: str = field(repr=False)
    bind: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    token_for_reads: bool = False

    def __post_init__(self) -> None:
        if _TOKEN.fullmatch(self.token) is None:
            raise ConfigError(
                "rest_token: a token is a text of 8 to 200 ASCII characters without spaces; `openssl rand -hex 32` "
                "makes one, and without the option every process makes its own"
            )

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why this request is refused; None if it is answered. The names of `headers` are in lower case."""
        return self._foreign(method, headers) or self._unproven(method, path, headers)

    def _foreign(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return Refusal(
                403,
                "the Host header names no host of this server: use the address that `strandline list` gives, or list "
                "the name in rest_hosts",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return Refusal(403, "the request comes from a page of another origin")
        site = headers.get("sec-fetch-site", "none")
        navigates = method in _READING and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("none", "same-origin") and not navigates:
            return Refusal(403, f"the request comes from a page of another origin (Sec-Fetch-Site: {site[:20]})")
        return None

    def _unproven(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        if not self.needs_token(method, path):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            return Refusal(401, "this call needs the token of the job: send the header `Authorization: Bearer <token>`")
        if not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return Refusal(401, "the token is wrong: every driver has its own, unless rest_token is set")
        return None

    def needs_token(self, method: str, path: str) -> bool:
        """Whether a call must carry the token."""
        if method not in _READING:
            return True
        if is_page_file(path):
            return False
        return self.token_for_reads or not is_loopback(self.bind) or _PRIVATE.match(path) is not None

    def _is_ours(self, header: str) -> bool:
        """Whether a name in the `Host` header is ours. A foreign name that was made to point here is not."""
        found = _HOST.fullmatch(header)
        if found is None:
            return False
        host = found["host"].strip("[]").lower()
        if host in LOOPBACK_NAMES or host == self.bind.lower() or host in {one.lower() for one in self.hosts}:
            return True
        if is_loopback(self.bind):
            return False
        # An address is no name, so nobody can make it point elsewhere.
        return (self.bind in _WILDCARDS and _is_address(host)) or host in _own_names()


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(32)


def is_loopback(bind: str) -> bool:
    """Whether only processes of this host reach a server that listens at `bind`."""
    if bind.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return False


def is_page_file(path: str) -> bool:
    """Whether a path is one of the page's files, which need no token."""
    return not path.startswith(("/jobs/", "/v1/", "/savepoint-disposal/")) and _PAGE.fullmatch(path) is not None


def with_token(url: str, token: str) -> str:
    """The link that opens the page with its token. The token is in the fragment, which browsers never send."""
    return f"{url.rstrip('/')}/#token={quote(token, safe='')}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0]}
