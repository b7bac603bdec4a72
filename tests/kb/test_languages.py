"""Documents in many languages: which language each is told to be in, and what is found of it by other forms of its words."""

import sqlite3
from contextlib import closing

import pytest

from localrag.kb.chunking import Passage
from localrag.kb.database import MIGRATIONS, embedded_sha256, migrate
from localrag.kb.protocols import DocumentRow
from localrag.kb.query import parse
from localrag.kb.store import Store
from localrag.text.languages import language_of
from tests.kb.servers import made_store
from tests.kb.support import problems

TEXTS = {
    "de-1": "Die Kündigungsfristen für Mieter stehen in dem Vertrag. Sie gelten auch für das Haus.",
    "de-2": "Der Hund ist in der Wohnung und wartet auf die Kinder.",
    "fr-1": "Le cheval est dans le pré, et la résiliation du bail est pour demain.",
    "fr-2": "Les journaux sont sur la table avec le pain et les fruits.",
    "ru-1": "Мы ждали две недели, а потом подали заявления. Отпуск был в августе.",
    "ru-2": "Эта книга лежит на столе у окна, рядом с лампой.",
    "es-1": "La canción que cantan los niños es de un país muy lejano, pero no la conocemos.",
    "en-1": "The generalist is one of the people who were here, and the timer is on the table.",
}
INFLECTED = {
    "Kündigungsfrist": "de-1",
    "Häuser": "de-1",
    "Verträgen": "de-1",
    "Wohnungen": "de-2",
    "chevaux": "fr-1",
    "résilier": "fr-1",
    "journal": "fr-2",
    "заявление": "ru-1",
    "неделя": "ru-1",
    "книгами": "ru-2",
    "canciones": "es-1",
}


def put(store, texts):
    with store.writing():
        for name, text in texts.items():
            passage = Passage(0, len(text), text)
            store.put_document(DocumentRow(f"/{name}", name, "", 1), [passage], {passage.sha256: b"\0" * 8})


@pytest.fixture(params=["folder", "server"])
def store(request, tmp_path):
    with made_store(request.param, tmp_path, request) as store:
        put(store, TEXTS)
        yield store


def found(store, text):
    ids = [one for one, _ in store.keyword_ids(parse(text).keyword, 99)]
    return [chunk.source for chunk in store.chunks(ids)]


def test_other_forms_of_a_word_are_found(store):
    missed = [word for word, name in INFLECTED.items() if found(store, word) != [name]]
    assert missed == []
    for name in ("words", "chunks_fts"):
        assert name not in store.full_texts or store.full_text_is_sound(name)


def test_stems_of_other_languages_do_not_match_words_of_english(store):
    """General is "general" in all of them; French stems "timers" to "timer", and Russian and Spanish leave it as it is."""
    assert found(store, "generalists") == ["en-1"]
    assert found(store, "timers") == ["en-1"]
    assert found(store, "general") == []


@pytest.mark.parametrize(
    ("phrase", "names"),
    [
        ('"die Kündigungsfristen für Mieter"', ["de-1"]),
        ("„DIE KUNDIGUNGSFRISTEN für Mieter“", ["de-1"]),
        ('"die Kündigungsfrist für Mieter"', []),
        ("«две недели»", ["ru-1"]),
        ("«две неделя»", []),
        ('"Hund Kinder"', []),
        ('"the people who"', ["en-1"]),
        ('"the timers is"', ["en-1"]),
        ('"la Kündigungsfristen" неделя "two weeks"', ["ru-1"]),
        ('"die Wohnung" "dem Vertrag" Häuser', ["de-1"]),
        ("Kündigungsf* неде* chevaux* заявлени*", ["de-1", "fr-1", "ru-1"]),
    ],
)
def test_phrases_are_found_as_they_are_written_and_beginnings_of_words(store, phrase, names):
    assert sorted(found(store, phrase)) == names
    ids = [one for one, _ in store.keyword_ids(parse("die la Mieter недели the is").keyword, 99)]
    holders = store.keyword_holders(parse(phrase).keyword, ids)
    assert {one for _, matching in holders for one in matching} <= {one for one, _ in store.keyword_ids(parse(phrase).keyword, 99)}


def test_a_name_weighs_the_same_in_all_languages(store):
    put(
        store,
        {"de-3": "Der PETG Faden ist in der Box und nicht auf dem Tisch.", "en-2": "The PETG wire is in the box and not on the table."},
    )
    (first, score), (second, other) = store.keyword_ids(parse("PETG").keyword, 9)
    assert {chunk.source for chunk in store.chunks([first, second])} == {"de-3", "en-2"}
    assert score == pytest.approx(other, rel=0.1)
    assert store.keyword_holders(parse("PETG Häuser").keyword, [first, second]) == [(2, sorted((first, second))), (1, [])]


def test_a_document_that_is_translated_is_found_in_its_new_language(store):
    put(store, {"de-2": "Les chats sont dans la maison et ils attendent les enfants."})
    assert found(store, "enfant") == ["de-2"]
    assert found(store, "Wohnung") == []
    same = Passage(0, len(TEXTS["de-1"]), TEXTS["de-1"])
    french = "Le locataire est dans la maison, et les clés sont sur la table pour nous. " * 3
    added = Passage(same.end + 2, same.end + 2 + len(french), french)
    with store.writing():  # the chunk stays, and its document is in another language now
        store.put_document(DocumentRow("/de-1", "de-1", "", 1), [same, added], {added.sha256: b"\0" * 8})
    assert found(store, "Kündigungsfrist") == []
    assert found(store, "Kündigungsfristen") == ["de-1"]
    for name in ("words", "chunks_fts"):
        assert name not in store.full_texts or store.full_text_is_sound(name)


def test_an_older_knowledge_base_gets_the_stems(tmp_path):
    path = tmp_path / "kb.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, MIGRATIONS[:4])
        for number, (name, text) in enumerate(TEXTS.items(), start=1):
            db.execute(
                "INSERT INTO documents (id, path, source, sha256, num_bytes, title) VALUES (?, ?, ?, '', 1, '')", (number, name, name)
            )
            values = (number, number, len(text), text, embedded_sha256("", text))
            db.execute(
                'INSERT INTO chunks (id, document_id, ordinal, start, "end", heading, text, sha256) VALUES (?, ?, 0, 0, ?, "", ?, ?)',
                values,
            )
            db.execute("INSERT INTO vectors (chunk_id, vector) VALUES (?, x'00')", (number,))
    with closing(Store(path)) as store:
        assert [word for word, name in INFLECTED.items() if found(store, word) != [name]] == []
        with store.writing():
            store.remove_documents(["de-1"])
        assert found(store, "Kündigungsfristen") == []
    assert problems(path) == []


def test_an_older_server_gets_the_stems(tmp_path, request):
    with made_store("server", tmp_path, request) as store:
        from localrag.kb.postgres.server import enter  # noqa: PLC0415  # its library is an extra

        put(store, TEXTS)
        store._db.rows("ALTER TABLE chunks DROP COLUMN language")
        store._db.rows("UPDATE chunks SET words = to_tsvector('words', text)")
        store._db.rows("UPDATE state SET version = 4")
        enter(store._db, store._schema.removeprefix("localrag_"))
        assert [word for word, name in INFLECTED.items() if found(store, word) != [name]] == []
        assert store.full_text_is_sound("words")


SAMPLES = {
    "cs": "Nájemní smlouva je na dobu neurčitou a výpovědní lhůta, která se počítá od prvního dne měsíce, je pro nájemce tři měsíce.",
    "da": "Du skal sige lejligheden op tre måneder før, og det er ikke nok at ringe; der skal sendes et brev efter aftale med udlejeren.",
    "de": "Wer in der Wohnung ein Haustier halten will, muss sich vorher mit dem Vermieter einigen, aber nicht bei kleinen Tieren.",
    "el": "Η προθεσμία για την αίτηση λήγει στο τέλος του μήνα.",
    "es": "El inquilino debe avisar al propietario con un mes de antelación, y no se le devuelve la fianza hasta el final.",
    "fi": "Vuokralaisen on ilmoitettava muutosta kirjallisesti, mutta se ei ole tarpeen, jos sopimus on määräaikainen.",
    "fr": "Le locataire doit prévenir le propriétaire un mois avant son départ, et la caution lui est rendue dans les deux mois.",
    "hu": "A bérlő egy hónappal a kiköltözés előtt köteles szólni, és a kauciót csak akkor kapja meg, ha nem maradt tartozása.",
    "it": "Il conduttore può recedere dal contratto con un preavviso di sei mesi, e la cauzione gli viene resa alla fine.",
    "nl": "De huurder moet een maand van tevoren opzeggen, en de borg wordt pas na de controle van het huis aan hem betaald.",
    "no": "Leietakeren må si fra tre måneder før, og det er ikke nok å ringe; et brev må sendes etter avtale med utleier av huset.",
    "pl": "Najemca może wypowiedzieć umowę na trzy miesiące przed końcem roku, ale nie jest to konieczne, jeżeli umowa wygasa sama.",
    "pt": "O inquilino deve avisar o senhorio com um mês de antecedência, e a caução não é devolvida até ao fim do contrato.",
    "ro": "Chiriașul trebuie să anunțe proprietarul cu o lună înainte, iar garanția nu este restituită decât la sfârșitul contractului.",
    "ru": "Жилец предупреждает хозяина за месяц до выезда, и залог ему возвращают, если квартира в порядке.",
    "sv": "Hyresgästen måste säga upp lägenheten tre månader före, och det är inte tillåtet att hyra ut den i andra hand utan lov.",
    "tr": "Kiracı bir ay önce haber vermek için yazı gönderir ve bu süre içinde ev sahibi ile görüşür; daha sonra depozito geri verilir.",
}
UNKNOWN = {
    "English": "The tenant must give notice one month before, and the deposit is returned when the flat has been inspected.",
    "English names of one title": "Hon. Ann Davis, Hon. Roy Diaz, Hon. Mark De Witt, Hon. Lia Sax, Hon. Ana De la Cruz. " * 9,
    "code": "def die(self, und=None):\n    for i in range(10):\n        if i not in self.seen and und is None:\n            return i\n" * 9,
    "numbers": "1 2 3 4 5 6 7 8 9 10, 20; 30 | 40",
    "Ukrainian": "Орендар повідомляє власника за місяць до виїзду, і заставу йому повертають, якщо квартира в порядку.",
    "Bulgarian": "Наемателят предупреждава собственика един месец преди да напусне, а депозитът се връща, ако жилището е в ред.",
    "Chinese": "租房合同的期限是一年。租客如果要提前退租,必须提前三十天书面通知房东。",
    "two languages": f"{SAMPLES['de']}\n\n{SAMPLES['fr']}",
    "German and English": f"{SAMPLES['de']} The tenant must give notice one month before, and the deposit is returned when it is empty.",
    "one word": "Kündigungsfrist 2024",
    "nothing": "",
}


@pytest.mark.parametrize(("language", "text"), SAMPLES.items())
def test_the_language_of_a_document(language, text):
    assert language_of([text]) == language
    assert language_of(text.split(",")) == language
    assert language_of([text.upper()]) == language


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_document_in_english_in_two_languages_or_in_none_that_is_known(kind):
    assert language_of([UNKNOWN[kind]]) == ""
