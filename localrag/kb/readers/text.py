"""Plain text, and the encoding of text that does not say it."""

from __future__ import annotations

import codecs
import re

from localrag.kb.readers.base import Reading, Section, UnreadableError

SUFFIXES = frozenset(
    """.txt .text .log .adoc .org .tex .yaml .yml .toml .ini .cfg .conf .properties .xml .css .scss .less
    .groovy .pl .pm .r .jl .swift .m .mm .dart .hs .ml .mli .clj .ex .exs .erl .elm .f .f90 .pas .sql .zsh .fish .ps1 .bat .cmd
    .cmake .mk .gradle .proto .graphql .tf .nix .vue .svelte .scad .gcode .vtt .srt .bib .diff .patch""".split()  # noqa: SIM905  # a word list reads better as words
)
"""Endings of files that are text whatever their encoding. Another file is text if it is valid UTF-8, or UTF-16 for certain."""

_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_SAMPLE_BYTES = 256 * 1024
_MIN_CHARS = 16
_SPACES, _STOPS = " \t\n\r\f\u3000", "。、，"

_CHARSETS = ["cp1252", "cp1250", "iso8859_2", "cp1251", "koi8_r", "cp932", "euc_jp", "gb18030", "big5", "cp949"]
_CHARSETS += ["cp1253", "cp1254", "cp1255", "cp1256"]
# With more to choose from, near relatives win over what is in use: ISO 8859-10 over 8859-2 and Windows-1254.
_RARE_FROM = {"gb18030": 0xD8, "big5": 0xC9, "cp949": 0xC9, "cp932": 0x98, "euc_jp": 0xD0}
"""Multi-byte encodings, each with the first lead byte of its rare characters: a text made of those is in another encoding."""
_LATIN = frozenset({"cp1252", "cp1250", "iso8859_2", "cp1254"})

_LETTERS = (  # what the languages of each encoding write beyond ASCII; the first of the best wins
    ("cp1252", "éèàùâêîôûëïüçœæ", "äöüß", "áéíóúüñ", "áâãàçéêíóôõú", "àèéìíòù", "åäöæøé", "éëïóöü", "áðéíóúýþæö"),
    ("iso8859_2", "áčďéěíňóřšťúůýž", "ąćęłńóśźż", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "čćđšž", "ăâîşţ"),
    ("cp1250", "áčďéěíňóřšťúůýž", "ąćęłńóśźż", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "čćđšž", "ăâîşţ"),
    ("cp1254", "çğıİöşüâî"),
)
_MIN_SHARE = 0.6
_SIGNS = frozenset("‘’‚“”„«»‹›–—…•°§€£©®™×·¿¡\xa0ºª½")
_MIXED = re.compile(r"[A-Za-z][^\W\d_A-Za-z\u00c0-\u024f]|[^\W\d_A-Za-z\u00c0-\u024f][A-Za-z]")
"""A letter of another script right beside a Latin one."""


def decode(data: bytes, *, known: bool) -> str:
    """The text of a file: by its byte order mark, else UTF-8, else (only if `known` to be text) by what it holds.

    The last resort is Windows-1252, then Latin-1. Single bytes that have no meaning become U+FFFD, as NUL characters do, which not every
    store keeps. Line ends stay as they are, so that offsets count the characters of the file without its mark. UnreadableError if it is
    not text.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding).replace("\0", "\ufffd")
            except UnicodeDecodeError:
                raise UnreadableError(f"it begins like {encoding.removesuffix('-sig').upper()}, but is not valid") from None
    if b"\0" in data:
        encoding = _utf16_without_mark(data) or ""
        if not encoding:
            raise UnreadableError("binary file")
        return data.decode(encoding, "replace").replace("\0", "\ufffd")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        if known:
            return _decode_other(data)
    raise UnreadableError("binary file, or text in an encoding that is not known")


def _decode_other(data: bytes) -> str:
    if _is_damaged_utf8(data):
        return data.decode("utf-8", "replace")
    encoding = _guess(data)
    if encoding is not None and encoding != "cp1252":
        return data.decode(encoding, "replace")
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read(data: bytes, *, known: bool) -> Reading:
    """The whole file as one section without a heading."""
    text = decode(data, known=known)
    return Reading(text, (Section(0, len(text)),), own_lines=True)


def _utf16_without_mark(data: bytes) -> str | None:
    """The byte order of UTF-16 that begins without its mark, "utf-16-le" or "utf-16-be"; None if it is not evident.

    It is evident where there is no NUL character, next to nothing is a control character or undefined, there are spaces, line ends or
    full stops, and the characters are mostly ASCII, or many with none of Latin letters beside those of another script.
    """
    sample = data[: _SAMPLE_BYTES // 2 * 2]
    if len(data) % 2 or len(sample) < 4:
        return None
    best, most = None, 0
    for encoding, half in (("utf-16-le", 1), ("utf-16-be", 0)):
        text = sample.decode(encoding, "replace")
        num_ascii = sample[half::2].count(0)
        num_odd = sum(not (char.isprintable() or char in _SPACES) or char == "\ufffd" for char in text)
        is_text = (
            "\0" not in text
            and num_odd * 100 <= len(text)
            and (num_ascii * 2 >= len(text) or (len(text) >= _MIN_CHARS and not _MIXED.search(text)))
        )
        num_common = num_ascii + sum(text.count(char) for char in _SPACES + _STOPS)
        if is_text and num_common > most:
            best, most = encoding, num_common
    return best


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether bytes that are not valid UTF-8 are UTF-8 for all but a few: a stretch cut within a character, or a stray byte."""
    text = data.decode("utf-8", "replace")
    num_bad = text.count("\ufffd")
    num_good = sum(len(run) for run in re.findall(r"[^\x00-\x7f\ufffd]+", text))
    return num_good > 8 * num_bad


def _guess(data: bytes) -> str | None:
    """The likeliest encoding of a text that is not Unicode, by its first 256 KB; None if nothing fits."""
    from charset_normalizer import from_bytes  # noqa: PLC0415  # 50 ms, wanted only for what is not Unicode

    sample = _sample(data)
    latin, share = _latin(sample)
    matches = from_bytes(sample, cp_isolation=_CHARSETS)
    for match in matches:
        if match.encoding in _LATIN:
            if share > _MIN_SHARE:
                return latin
        elif not (_is_rare(match.encoding, str(match)) if match.encoding in _RARE_FROM else _MIXED.search(str(match))):
            return match.encoding
    return latin if len(matches) else None


def _is_rare(encoding: str, text: str) -> bool:
    first = [char.encode(encoding)[0] for char in text[:20_000] if char > "\x7f"]
    # half-width katakana take one byte, which tells nothing
    return sum(byte >= _RARE_FROM[encoding] for byte in first if not (encoding == "cp932" and 0xA0 <= byte <= 0xDF)) * 2 > len(first)


def _sample(data: bytes) -> bytes:
    """The beginning, up to a border: within a character no encoding of several bytes would fit."""
    if len(data) <= _SAMPLE_BYTES:
        return data
    end = max(data.rfind(border, 0, _SAMPLE_BYTES) for border in (b"\n", b" ", b"\r"))
    return data[: end if end > 0 else _SAMPLE_BYTES]


def _latin(sample: bytes) -> tuple[str, float]:
    """Which Latin encoding: the one in which most characters beyond ASCII are letters of one language; and the share of those."""
    best, most = "cp1252", -1
    beyond = bytes(byte for byte in sample if byte > 0x7F)
    for encoding, *languages in _LETTERS:
        text = beyond.decode(encoding, "replace").lower()
        counts = {char: text.count(char) for char in set(text)}
        signs = sum(counts.get(char, 0) for char in _SIGNS)
        num_known = max(sum(counts.get(char, 0) for char in letters) for letters in languages) + signs
        if num_known > most:
            best, most = encoding, num_known
    return best, most / max(1, len(beyond))
