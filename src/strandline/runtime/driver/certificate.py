"""Makes the certificate of a run, for `tls="auto"`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from strandline.config import Config
from strandline.errors import ConfigError
from strandline.runtime.protocol.tls import RUN_NAME, Tls

_VALID = timedelta(days=3650)
"""Longer than a run lasts. The key is forgotten with the run."""
_CLOCKS_DIFFER = timedelta(days=1)


def run_tls(config: Config) -> Tls | None:
    """The TLS of a new run; None if its connections are not encrypted."""
    if config.tls == "auto":
        return _make_certificate()
    if config.tls_certificate is None or config.tls_key is None or config.tls_ca is None:
        return None
    tls = Tls(config.tls_certificate, config.tls_key, config.tls_ca, config.tls_server_name)
    tls.server_options()  # a file that is missing here is told at once
    return tls


def _make_certificate() -> Tls:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError(
            'tls = "auto" needs the package cryptography on the driver; install strandline[tls], or give '
            "tls_certificate, tls_key and tls_ca"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, RUN_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(RUN_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Tls(text, private, text, RUN_NAME, in_files=False)
