"""Encryption of the connections between hosts: both ends show a certificate, and each checks the other's.

With `tls="auto"` the driver makes one certificate for the run, and hands it out with its key and the secret. Otherwise
every host has a certificate of its own in files, and its key never leaves the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from strandline.errors import ConfigError

RUN_NAME: Final = "strandline"
"""The name in a certificate that was made for a run. The certificate itself is what others check."""


class Tls(msgspec.Struct, frozen=True):
    """What every process of a run knows of its TLS."""

    certificate: str
    key: str
    ca: str
    server_name: str | None = None
    """The name that certificates hold; None: that of the host."""
    in_files: bool = True
    """Whether certificate, key and CA are names of files, which every host has, or the text of such files."""

    def __repr__(self) -> str:
        """Without the key."""
        return f"Tls(server_name={self.server_name!r}, in_files={self.in_files})"

    def client_options(self) -> dict[str, Any]:
        """Options of a Flight client. Raises `ConfigError` if a file cannot be read."""
        name = {} if self.server_name is None else {"override_hostname": self.server_name}
        return {
            "tls_root_certs": self._read("tls_ca", self.ca),
            "cert_chain": self._read("tls_certificate", self.certificate),
            "private_key": self._read("tls_key", self.key),
            **name,
        }

    def server_options(self) -> dict[str, Any]:
        """Options of a Flight server, which refuses clients without a certificate. Raises `ConfigError`."""
        pair = self._read("tls_certificate", self.certificate), self._read("tls_key", self.key)
        return {
            "tls_certificates": [pair],
            "verify_client": True,
            "root_certificates": self._read("tls_ca", self.ca),
        }

    def _read(self, option: str, place: str) -> bytes:
        if not self.in_files:
            return place.encode()
        try:
            return Path(place).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{option} = {place!r} cannot be read on this host: {error.strerror}; every host of the run needs the "
                "file, and the user of the job must be allowed to read it"
            ) from None
