"""What a text may show to a person: no passwords, and no control characters that a terminal obeys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"

_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s'\"@]*:[^/?#\s'\"]*@")
"""The user and the password in a URL. A password may hold an `@`, so the last one counts."""
_SIGNATURE = re.compile(
    r"(?P<name>[?&](?:sig|signature|token|x-amz-signature|x-amz-security-token|x-amz-credential|x-goog-signature)=)"
    r"[^&\s'\"]+",
    re.IGNORECASE,
)
"""The parameter of a signed URL that gives access."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and the marks that change the direction of text."""
_SECRET_NAME = re.compile(
    r"secret|token|password|passwd|credential|private|sas|access_?key|account_?key", re.IGNORECASE
)
_PUBLIC_NAME = re.compile(r"key_?id$|_path$|_file$|_uri$|endpoint", re.IGNORECASE)
_SHORTEST = 4
"""A shorter value is not hidden wherever it occurs: it would also be hidden inside other words."""


def shown(text: str) -> str:
    """`text` as it may be shown: credentials in URLs are hidden, and control characters are written as escapes."""
    hidden = _USER_INFO.sub(rf"\g<scheme>{HIDDEN}@", text) if "://" in text else text
    hidden = _SIGNATURE.sub(rf"\g<name>{HIDDEN}", hidden) if "=" in hidden else hidden
    return without_controls(hidden)


def has_password(url: str) -> bool:
    """Whether `url` holds a user and a password, which every process that is given the URL would show."""
    return _USER_INFO.match(url) is not None


def without_controls(text: str) -> str:
    """`text` with control characters as escapes, so that a terminal shows them instead of obeying."""
    return text if text.isprintable() else _CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


def without_values(text: str, secrets: Iterable[str]) -> str:
    """`shown(text)`, and none of the `secrets` in it."""
    for secret in secrets:
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return shown(text)


def is_secret(name: str, value: str = "") -> bool:
    """Whether the storage option `name` gives access, or its `value` is a URL that does."""
    return (bool(_SECRET_NAME.search(name)) and not _PUBLIC_NAME.search(name)) or (
        shown(value) != without_controls(value)
    )


def secret_values(options: Mapping[str, str]) -> list[str]:
    """The values of the storage options that give access. `shown` hides the passwords in URLs."""
    return [value for name, value in options.items() if is_secret(name)]
