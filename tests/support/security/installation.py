"""Installations as `baton certs` writes them."""

from dataclasses import dataclass
from pathlib import Path

from baton.cli.main import main as baton
from baton.service.security.access import Access
from baton.service.security.tls import Tls

API_KEY = "api-key"  # the file of the key that it makes


@dataclass(frozen=True)
class Installation:
    """The folder that `baton certs` wrote."""

    folder: Path

    def tls(self, role: str) -> Tls:
        return Tls(self.folder / f"{role}.crt", self.folder / f"{role}.key", self.folder / "ca.crt")

    def tls_options(self, role: str) -> list[str]:
        """Return the options that give `tls(role)` to a process."""
        files = {"cert": f"{role}.crt", "key": f"{role}.key", "ca": "ca.crt"}
        return [word for name, file in files.items() for word in (f"--tls-{name}", str(self.folder / file))]

    def access(self, role: str | None = None, key: str | None = None) -> Access:
        """Return what a caller shows: the certificate of a role, the key in a file of the folder."""
        shown = (self.folder / f"{role}.crt", self.folder / f"{role}.key") if role else (None, None)
        return Access(self.folder / "ca.crt", *shown, self.folder / key if key else None)

    @property
    def api_key(self) -> str:
        return (self.folder / API_KEY).read_text().strip()


def install(folder: Path, *options: str) -> Installation:
    """Write an installation."""
    assert baton(["certs", "--out", str(folder), *options]) == 0
    return Installation(folder)
