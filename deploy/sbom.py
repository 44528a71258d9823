"""What an image consists of, as CycloneDX JSON: its Debian packages and its Python distributions. Runs inside the
image:

docker run --rm --interactive --network none baton:cpu python - < deploy/sbom.py > sbom.json
"""

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote

DPKG = Path("/var/lib/dpkg/status")


def debian_packages(status: str) -> list[dict]:
    """Return a component for each installed package of dpkg's status file."""
    found = []
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            url = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            found.append({"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url})
    return found


def python_distributions() -> list[dict]:
    """Return a component for each distribution that this interpreter can import."""
    found = {}
    for each in distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        url = f"pkg:pypi/{name}@{quote(each.version)}"
        found.setdefault(url, {"type": "library", "name": name, "version": each.version, "purl": url, "bom-ref": url})
    return list(found.values())


def bill() -> dict:
    """Return the document: no date and no random number, so that equal images have equal ones."""
    status = DPKG.read_text() if DPKG.exists() else ""
    components = sorted((*debian_packages(status), *python_distributions()), key=lambda each: each["purl"])
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    print()
