"""Encodings: texts of many languages as their encodings write them, and bytes that are no text."""

import codecs
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.readers.base import UnreadableError
from localrag.kb.readers.text import decode, read

JAPANESE = "これは日本語の文章です。ヒーターの温度を確認してください。\n印刷を始める前に、ベッドを掃除します。"
CHINESE = "这是一个中文句子。请在打印之前检查加热床的温度。\n如果喷嘴堵塞，请清洁它。"
TAIWANESE = "這是一個中文句子。請在列印之前檢查加熱床的溫度。\n如果噴嘴堵塞，請清潔它。"
KOREAN = "이것은 한국어 문장입니다. 인쇄를 시작하기 전에 온도를 확인하십시오.\n노즐이 막히면 청소하십시오."
RUSSIAN = "Это предложение на русском языке. Перед печатью проверьте температуру стола.\nЕсли сопло засорено, очистите его."
FRENCH = "Le café est prêt – vérifiez la température du plateau avant d’imprimer."
GERMAN = "Über die Größe des Rahmens läßt sich streiten; die Düse muß heiß sein."
PORTUGUESE = "A impressão não começou; verifique a posição da mesa às três."
SWEDISH = "Kontrollera bäddens temperatur före utskrift. Är munstycket igensatt?"
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. Zkontrolujte teplotu podložky před tiskem."
POLISH = "Przed drukowaniem sprawdź temperaturę stołu. Jeśli dysza jest zatkana, wyczyść ją."
HUNGARIAN = "Árvíztűrő tükörfúrógép. Ellenőrizze az ágy hőmérsékletét a nyomtatás előtt."
GREEK = "Αυτή είναι μια ελληνική πρόταση. Ελέγξτε τη θερμοκρασία πριν από την εκτύπωση."
TURKISH = "Bu Türkçe bir cümledir. Yazdırmadan önce sıcaklığı kontrol edin. Işık şöyle güçlü."
HEBREW = "זהו משפט בעברית. בדוק את הטמפרטורה לפני ההדפסה."

SAMPLES = [
    ("shift_jis", JAPANESE),
    ("euc_jp", JAPANESE),
    ("gb18030", CHINESE),
    ("big5", TAIWANESE),
    ("euc_kr", KOREAN),
    ("koi8_r", RUSSIAN),
    ("cp1251", RUSSIAN),
    ("cp1252", FRENCH),
    ("cp1252", GERMAN),
    ("cp1252", PORTUGUESE),
    ("latin-1", SWEDISH),
    ("iso8859_2", CZECH),
    ("cp1250", CZECH),
    ("iso8859_2", POLISH),
    ("cp1250", POLISH),
    ("cp1250", HUNGARIAN),
    ("cp1253", GREEK),
    ("cp1254", TURKISH),
    ("cp1255", HEBREW),
    ("utf-16-le", JAPANESE),
    ("utf-16-be", RUSSIAN),
    ("utf-16-le", GERMAN),
    ("utf-16-be", CHINESE),
]


@pytest.mark.parametrize(("encoding", "text"), SAMPLES)
@pytest.mark.parametrize("times", [1, 20])
def test_an_encoding_is_told_by_the_text(encoding, text, times):
    assert decode((text * times).encode(encoding), known=True) == text * times


@pytest.mark.parametrize("encoding", ["shift_jis", "gb18030", "euc_kr", "big5", "koi8_r"])
def test_a_sample_decides_for_a_long_file(encoding):
    text = dict(SAMPLES)[encoding]
    long = text * 20_000  # without white space for hundreds of kilobytes, the sample ends within a character
    started = time.process_time()
    assert decode(long.replace("\n", "").replace(" ", "").encode(encoding), known=True) == long.replace("\n", "").replace(" ", "")
    assert time.process_time() - started < 5


def test_latin_text_that_is_mostly_ascii():
    assert decode(b"it\x92s caf\xe9", known=True) == "it’s café"
    assert decode(b"a = 1\n" * 1000 + b"# caf\xe9\n", known=True).endswith("# café\n")


def test_utf8_with_a_stray_byte_stays_utf8():
    assert decode("größe, öfter ".encode() * 10 + b"\xe9", known=True) == "größe, öfter " * 10 + "\ufffd"
    cut = ("ж" * 100).encode()[:-1]
    assert decode(cut, known=True) == "ж" * 99 + "\ufffd"


@pytest.mark.parametrize(
    "data",
    [
        b"ab\0cd",
        b"\0" * 100,
        b"text\n" * 50 + b"\0",
        b"\x01\0\x02\0" * 100,  # 16-bit numbers
        random.Random(1).randbytes(4096),
        "text".encode("utf-32-le"),
        b"PK\x03\x04\0\0",
    ],
)
def test_binary_files_are_none_of_these(data):
    for known in (True, False):
        with pytest.raises(UnreadableError, match="binary file"):
            decode(data, known=known)


def test_a_file_of_unknown_kind_must_be_unicode():
    assert decode("naïve".encode(), known=False) == "naïve"
    assert decode(GERMAN.encode("utf-16-le"), known=False) == GERMAN
    with pytest.raises(UnreadableError, match="encoding that is not known"):
        decode(FRENCH.encode("cp1252"), known=False)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), min_size=1))
def test_unicode_is_never_guessed(text):
    assert decode(text.encode(), known=True) == text
    assert decode(codecs.BOM_UTF16_BE + text.encode("utf-16-be"), known=False) == text


@given(st.binary(max_size=300))
def test_any_bytes_are_text_or_unreadable(data):
    try:
        reading = read(data, known=True)
    except UnreadableError:
        return
    assert reading.own_lines
    assert [(section.start, section.end) for section in reading.sections] == [(0, len(reading.text))]
    reading.text.encode()
