"""Writes the pages; says which of them changed."""

import sys

from docgen import FOLDER, PAGES


def main() -> None:
    for name, made in PAGES.items():
        file, text = FOLDER / name, made()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            sys.stdout.write(f"docs/reference/{name} is written anew\n")


main()
