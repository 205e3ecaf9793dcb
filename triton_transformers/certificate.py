"""Read when the gateway's certificate expires, and warn of it."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from triton_transformers.settings import Settings, UserError

# The alert CertificateExpires has the same number.
WARNING_DAYS = 14
DAY_S = 86_400


def expiry(path: Path) -> float:
    """Return when the certificate expires, in seconds since 1970. Raise UserError if the file has none."""
    try:
        # The standard library has no public function that reads a certificate's dates from a file.
        certificate = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    except OSError as error:  # ssl.SSLError is one
        raise UserError(f"TLS_CERT={path}: not a certificate in PEM ({error})") from None
    return ssl.cert_time_to_seconds(certificate["notAfter"])


def expiry_warning(settings: Settings) -> str:
    """Return what to do about a certificate that has expired or will soon; nothing if there is nothing to do."""
    tls = settings.tls()
    if not tls:
        return ""
    try:
        end = expiry(tls[0])
    except UserError as error:
        return str(error)
    days = int((end - time.time()) // DAY_S)  # negative after the end
    if days >= WARNING_DAYS:
        return ""
    date = time.strftime("%Y-%m-%d", time.gmtime(end))
    state = f"expires on {date}" if days >= 0 else f"expired on {date}, so clients refuse it"
    return f"TLS_CERT={settings['TLS_CERT']}: the certificate {state}. Renew it, then run `make up`"
