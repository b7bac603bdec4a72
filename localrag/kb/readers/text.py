"""Read plain text, and detect the encoding of text that does not declare it."""

from __future__ import annotations

import codecs
import re

from localrag.kb.readers.base import Reading, Section, UnreadableError

SUFFIXES = frozenset(
    """.txt .text .log .adoc .org .tex .yaml .yml .toml .ini .cfg .conf .properties .xml .css .scss .less
    .groovy .pl .pm .r .jl .swift .m .mm .dart .hs .ml .mli .clj .ex .exs .erl .elm .f .f90 .pas .sql .zsh .fish .ps1 .bat .cmd
    .cmake .mk .gradle .proto .graphql .tf .nix .vue .svelte .scad .gcode .vtt .srt .bib .diff .patch""".split()  # noqa: SIM905  # a word list reads better as words
)
"""Extensions of files that are text in any encoding. Other files are text only if they are valid UTF-8 or evidently UTF-16."""

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
# With more candidates, rare relatives win over common encodings: ISO 8859-10 over 8859-2 and Windows-1254.
_RARE_FROM = {"gb18030": 0xD8, "big5": 0xC9, "cp949": 0xC9, "cp932": 0x98, "euc_jp": 0xD0}
"""Multi-byte encoding → first lead byte of its rare characters. Text made mostly of those is in another encoding."""
_LATIN = frozenset({"cp1252", "cp1250", "iso8859_2", "cp1254"})

_LETTERS = (  # encoding and the non-ASCII letters of its languages; ties go to the first
    ("cp1252", "éèàùâêîôûëïüçœæ", "äöüß", "áéíóúüñ", "áâãàçéêíóôõú", "àèéìíòù", "åäöæøé", "éëïóöü", "áðéíóúýþæö"),
    ("iso8859_2", "áčďéěíňóřšťúůýž", "ąćęłńóśźż", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "čćđšž", "ăâîşţ"),
    ("cp1250", "áčďéěíňóřšťúůýž", "ąćęłńóśźż", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "čćđšž", "ăâîşţ"),
    ("cp1254", "çğıİöşüâî"),
)
_MIN_SHARE = 0.6
_SIGNS = frozenset("‘’‚“”„«»‹›–—…•°§€£©®™×·¿¡\xa0ºª½")
_MIXED = re.compile(r"[A-Za-z][^\W\d_A-Za-z\u00c0-\u024f]|[^\W\d_A-Za-z\u00c0-\u024f][A-Za-z]")
"""A Latin letter directly next to a letter of another script."""


def decode(data: bytes, *, known: bool) -> str:
    """Decode a file by its byte order mark, or else as UTF-8, or else, if it is `known` to be text, by guessing the encoding.

    The last resorts are Windows-1252 and Latin-1. Invalid bytes become U+FFFD, and so do NUL characters, which not every store accepts.
    Line ends stay as they are, so that offsets count the characters of the file without its byte order mark. Raises UnreadableError if
    the file is not text.
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
    """Read the whole file as one section without a heading."""
    text = decode(data, known=known)
    return Reading(text, (Section(0, len(text)),), own_lines=True)


def _utf16_without_mark(data: bytes) -> str | None:
    """Detect UTF-16 without a byte order mark: "utf-16-le", "utf-16-be", or None if it is not evident.

    Evident means: no NUL characters, almost no control or undefined characters, some spaces, line ends or full stops; and either mostly
    ASCII, or enough characters without a Latin letter next to one of another script.
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
    """Whether bytes are UTF-8 with few errors, such as a character that was cut off or a stray byte."""
    text = data.decode("utf-8", "replace")
    num_bad = text.count("\ufffd")
    num_good = sum(len(run) for run in re.findall(r"[^\x00-\x7f\ufffd]+", text))
    return num_good > 8 * num_bad


def _guess(data: bytes) -> str | None:
    """Guess the encoding of a text that is not Unicode from its first 256 KB; None if nothing fits."""
    from charset_normalizer import from_bytes  # noqa: PLC0415  # heavy: 50 ms, and rarely needed

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
    # half-width katakana take one byte and say nothing about lead bytes
    return sum(byte >= _RARE_FROM[encoding] for byte in first if not (encoding == "cp932" and 0xA0 <= byte <= 0xDF)) * 2 > len(first)


def _sample(data: bytes) -> bytes:
    """Return the beginning of the data up to a line end or space, so that no multi-byte character is cut."""
    if len(data) <= _SAMPLE_BYTES:
        return data
    end = max(data.rfind(border, 0, _SAMPLE_BYTES) for border in (b"\n", b" ", b"\r"))
    return data[: end if end > 0 else _SAMPLE_BYTES]


def _latin(sample: bytes) -> tuple[str, float]:
    """Return the Latin encoding in which most non-ASCII characters are letters of one language, and the share of those letters."""
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
