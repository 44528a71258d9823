"""One installation: the folder that `baton certs` wrote."""

from dataclasses import dataclass
from pathlib import Path

from baton.cli.main import main as baton
from baton.service.security.access import Access
from baton.service.security.tls import Tls


@dataclass(frozen=True)
class Installation:
    """The folder that `baton certs` wrote."""

    folder: Path

    def tls(self, role: str) -> Tls:
        return Tls(self.folder / f"{role}.crt", self.folder / f"{role}.key", self.folder / "ca.crt")

    def access(self, role: str | None = None, with_key: bool = False) -> Access:
        shown = (self.folder / f"{role}.crt", self.folder / f"{role}.key") if role else (None, None)
        return Access(self.folder / "ca.crt", *shown, self.folder / "api-key" if with_key else None)

    @property
    def api_key(self) -> str:
        return (self.folder / "api-key").read_text().strip()


def install(folder: Path, *options: str) -> Installation:
    assert baton(["certs", "--out", str(folder), *options]) == 0
    return Installation(folder)
