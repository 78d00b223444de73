"""Certificates of a cluster whose clients speak TLS, from a CA that is made for it."""

from __future__ import annotations

from pathlib import Path

import trustme

CA_FILE = "ca.pem"


def write_certificate(folder: Path) -> dict[str, str]:
    """Write a certificate for this machine, its key, and the CA that clients trust; the keys of a
    listener that shows it."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / CA_FILE))
    issued = ca.issue_cert("127.0.0.1")
    certificate, key = folder / "node.pem", folder / "node.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    return {"certificate_file": str(certificate), "key_file": str(key)}
