import pytest

from localrag.kb.query import needs_all

ALL = """How many notes mention Berlin?
List all suppliers.
Give me every invoice of May
what is the total number of printers
Count the entries in the log
Wie viele Verträge gibt es?
Liste alle Lieferanten auf
Nenne mir alle Kunden in Wien
Zähle die Fehler im Protokoll auf
Wie hoch ist die Anzahl der Verträge
Combien de contrats avons-nous ?
Énumère toutes les factures
Donne-moi tous les fournisseurs
Combien d’erreurs y a-t-il ?
¿Cuántos contratos hay?
Enumera todos los proveedores
Dame todas las facturas
¿Cuáles son todas las reglas?
What is the average price of an order?
How much do customers pay on average?
What is the median age of the members?
What is the total of the invoices?
What is the total?
What did we spend in total?
What is the total cost of the repairs?
Which customer ordered the most?
Who has the most unpaid invoices?
Which supplier is late most often?
What is the most common fault?
Which orders are above 100 euros?
Which customers placed fewer than three orders?
Are there fewer than 5 suppliers in May?
Who spent more than $200?
Show invoices over 1,000 euros
What is the price of each product?
Does every contract name a deadline?
Which customers did not pay their bill?
Summarize everything
How often was the pump repaired?
Average price per customer
What is our total?
What do most customers order?
What did most of our members choose?
Each customer's balance?
Each customer’s balance?
Every open invoice
How many days were lost?
How many hours have been billed?
Which product has the highest price?
Which of the suppliers is the cheapest?
Was kostet eine Reparatur im Durchschnitt?
Wie hoch ist der durchschnittliche Preis?
Was haben wir insgesamt ausgegeben?
Wie hoch ist die Gesamtsumme?
Welcher Kunde hat am meisten bestellt?
Wer hat die meisten offenen Rechnungen?
Welche Rechnungen liegen über 100 Euro?
Welche Kunden haben nicht bezahlt?
Was kostet jedes Produkt?
Fasse alles zusammen
Welches Produkt hat den höchsten Preis?
Welcher Lieferant ist der günstigste?
Welche Rechnung ist die größte?
Quel est le prix moyen ?
Combien payons-nous en moyenne ?
Quel est le montant total des factures ?
Qui a le plus de factures ?
Quelles factures dépassent 100 euros ?
Quels clients n'ont pas payé ?
Quel est le prix de chaque produit ?
Résume tout
Quel produit a le prix le plus élevé ?
¿Cuál es el precio medio?
¿Cuánto gastamos en total?
¿Cuál es el importe total?
¿Quién compra más a menudo?
¿Qué facturas están por encima de 100 euros?
¿Qué clientes no han pagado?
¿Cuál es el precio de cada producto?
¿Qué producto tiene el precio más alto?""".splitlines()
SOME = """How many degrees does PLA need?
What is the serial number of the pump?
How do I list files?
Wie viele Stunden dauert das Trocknen?
Wie viel kostet ein Nozzle?
Combien de temps faut-il ?
Combien coûte une buse ?
¿Cuántos grados necesita el PLA?
¿Cuánto cuesta?
Is that all?
What are the steps to dry nylon?
What do I do most of the time?
Which setting is right most of the time?
Which nozzle is most suitable?
Which glue holds at most 5 kg?
What hangs above the bed?
What happens above 60 degrees?
Can PLA be printed above 200 degrees?
Which nozzle is used above 250 degrees?
Which glass is used above 3 meters?
What is the total length of the pump?
What is the total weight?
Is it right for the average user?
Is its quality above average?
What does PLA mean?
What must be oiled every day?
What is checked each time?
How do they differ from each other?
How often must the filter be changed?
Can I return it in fewer than 14 days?
What is the most important rule?
What is the highest temperature of the oven?
What is the longest side of the bed?
What is our total length?
What do I have most of the time?
How many days does drying take?
How many hours is nylon dried?
Every day, what is oiled?
Each time it stops, what do I do?
Is the average person tall enough?
Which nozzle has the highest-quality coating?
Was hängt über dem Bett?
Welche Düse braucht PETG?
Was ist die meiste Zeit zu tun?
Was wird jeden Tag geölt?
Meistens ist das Bett warm, warum?
Was ist über 60 Grad erlaubt?
Welche Temperatur hat die Düse?
Was ist die höchste Temperatur des Ofens?
Qu'est-ce qui se trouve au-dessus du lit ?
Que faut-il faire chaque jour ?
En tout cas, que faire ?
Quelle est la longueur totale ?
¿Qué hay por encima de la cama?
¿Qué se hace cada día?
¿Cuál es la longitud total?
¿Qué temperatura necesita el PLA?
""".splitlines()


@pytest.mark.parametrize("question", ALL)
def test_questions_that_need_every_row(question):
    assert needs_all(question)
    assert needs_all(question.upper())


@pytest.mark.parametrize("question", [*SOME, "", "x" * 10_000, "list " * 10_000])
def test_questions_that_a_passage_answers(question):
    assert not needs_all(question)
