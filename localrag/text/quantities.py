"""The numbers in a text, with their units: how they are written in many languages, and when two of them say the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localrag.text.terms import CJK

_JOINT = re.compile(r"\s*+(?:[-–—~〜～,/]|to|and|or|bis|und|oder|à|et|ou|a|y|o|e|до|и|至|到|から)?+\s*+")
_MAX_DIGITS = 40


def _unit_table() -> dict[str, tuple[str, float]]:
    """Map each spelling of a unit to its dimension and its size in a base unit."""
    rows = """
    time 1 s sec secs second seconds sekunde sekunden seconde secondes segundo segundos secondo secondi секунд секунды секунда 秒
    time 60 min mins minute minutes minuten minuto minutos minuti минут минуты минута 分 分钟 分間
    time 3600 h hr hrs hour hours std stunde stunden heure heures hora horas ora ore uur uren час часа часов 小时 時間 시간
    time 86400 day days tag tage tagen jour jours día días dia dias giorno giorni dag dagen день дня дней 天 日 일
    time 604800 week weeks woche wochen semaine semaines semana semanas settimana settimane weken неделя недели недель 周 週 週間 주
    months 1 month months monat monate monaten mois mes meses mese mesi maand maanden месяц месяца месяцев 个月 ヶ月 개월
    months 12 year years yr yrs jahr jahre jahren an ans année années año años ano anos anno anni jaar год года лет 年 년
    length 1e-9 nm
    length 1e-6 µm μm micron microns micrometre micrometres micrometer micrometers
    length 0.001 mm millimetre millimetres millimeter millimeters milímetros мм
    length 0.01 cm centimetre centimetres centimeter centimeters zentimeter см
    length 1 m metre metres meter meters mètre mètres metro metros метр метра метров 米
    length 1000 km kilometre kilometres kilometer kilometers км 公里
    length 0.0254 inch inches
    length 0.3048 ft feet foot
    length 1609.344 mile miles
    mass 1e-6 mg milligram milligrams
    mass 0.001 g gram grams gramm gramme grammes gramos г 克
    mass 1 kg kilo kilos kilogram kilograms kilogramm kilogramme кг 公斤
    mass 0.45359237 lb lbs
    mass 0.028349523125 oz ounce ounces
    volume 0.001 ml millilitre millilitres milliliter milliliters
    volume 0.01 cl
    volume 1 l L litre litres liter liters litro litros литр литра литров 升
    celsius 1 °C ℃ celsius
    fahrenheit 1 °F ℉ fahrenheit
    degree 1 ° degree degrees grad degré degrés grado grados gradi graden градус градуса градусов 度 도
    ratio 0.01 % percent percents prozent procent процент процента процентов 퍼센트
    ratio 0.001 ‰
    euro 1 € eur euro euros евро
    dollar 1 $ usd dollar dollars
    sterling 1 £ gbp
    yen 1 ¥ jpy yen 円
    speed 0.001 mm/s
    speed 1 m/s
    speed 0.2777777778 km/h kmh
    data 1 bytes
    data 1000 kb
    data 1e6 mb
    data 1e9 gb
    data 1e12 tb
    data 1024 kib
    data 1048576 mib
    data 1073741824 gib
    frequency 1 hz
    frequency 1000 khz
    frequency 1e6 mhz
    frequency 1e9 ghz
    pressure 1 pa
    pressure 1000 kpa
    pressure 1e6 mpa
    pressure 1e9 gpa
    pressure 1e5 bar
    power 1 W watt watts
    power 1000 kw
    energy 1 wh
    energy 1000 kwh
    voltage 1 V volt volts
    current 1 amp amps
    force 1 newton newtons
    angle 1 rad
    """
    table: dict[str, tuple[str, float]] = {}
    for row in rows.strip().splitlines():
        dimension, size, *names = row.split()
        table |= dict.fromkeys(names, (dimension, float(size)))
    return table


_UNITS = _unit_table()
_GAP = r"[ \u00a0\u202f\u2009]"
_OUTSIDE = rf"(?:(?<!\w)(?<!\w[.,])|(?<={CJK.pattern}))"
_QUANTITY = re.compile(
    rf"(?P<sign>(?<![\w)\]%°])(?<!\d\s)[-−–](?=\d)|{_OUTSIDE})(?P<money>[€$£¥]{_GAP}?)?"
    rf"(?P<digits>\d++(?:[.,]\d++|['’\u00a0\u202f\u2009 ]\d{{3}}(?!\d))*+)"
    rf"(?P<unit>(?:{_GAP}|-)?(?:degrees?{_GAP}(?:celsius|fahrenheit|c\b|f\b)|grad{_GAP}celsius|°{_GAP}?[CF]?|per{_GAP}cent|[%‰€$£¥℃℉]"
    rf"|{'|'.join(sorted((name for name in _UNITS if CJK.match(name)), key=len, reverse=True))}"
    rf"|(?:(?!{CJK.pattern})[^\W\d_])++(?:/[a-z]++)?))?",
    re.IGNORECASE,
)

_DECADE = re.compile(r"[12]\d{3}s")

_DEGREES = {
    "degree": frozenset({"degree", "celsius", "fahrenheit"}),
    "celsius": frozenset({"degree", "celsius"}),
    "fahrenheit": frozenset({"degree", "fahrenheit"}),
}
"""What degrees of each kind may be called."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in a text. `values` are its possible readings: 1.000 can be a thousand or one. `dimension` is "" without a unit."""

    start: int
    end: int
    text: str
    values: frozenset[float]
    dimension: str = ""
    size: float = 1.0

    @property
    def comparable(self) -> frozenset[str]:
        """The dimensions that another text may give the same quantity in: "60 degrees" may stand for "60 °C"."""
        return _DEGREES.get(self.dimension, frozenset({self.dimension}))

    @property
    def amounts(self) -> frozenset[float]:
        """The values in the base unit, rounded to 10 digits."""
        return frozenset(float(f"{value * self.size:.10g}") for value in self.values)


NUMBER_WORDS = {
    word: float(value)
    for value, row in enumerate(
        (
            "one a an ein eine einen einem einer un une uno una один одна одно",
            "two zwei deux dos due два две",
            "three drei trois tres tre три",
            "four vier quatre cuatro quattro четыре",
            "five fünf cinq cinco cinque пять",
            "six sechs seis sei шесть",
            "seven sieben sept siete sette семь",
            "eight acht huit ocho otto восемь",
            "nine neun neuf nueve nove девять",
            "ten zehn dix diez dieci десять",
            "eleven elf onze once undici одиннадцать",
            "twelve zwölf douze doce dodici двенадцать",
        ),
        1,
    )
    for word in row.split()
}
"""Number words and their values. They count in a source, where they support a number in digits."""


def find_quantities(text: str) -> tuple[list[Quantity], str]:
    """Return the quantities in a text, in order, and the text with spaces in their place."""
    found: list[Quantity] = []
    chars = list(text)
    for match in _QUANTITY.finditer(text):
        values = _values(match["digits"], is_negative=match["sign"] not in ("", None))
        name = (match["unit"] or "").lstrip(" \u00a0\u202f\u2009-")
        unit = unit_of(name)
        is_attached = bool(name) and match["unit"] == name and name[0].isalpha()
        if values is None or (is_attached and (unit is None or _DECADE.fullmatch(match[0]))):
            continue  # a code, such as 3D or 1.2.3, or a decade
        start, end = match.start(), match.end() if unit else match.end("digits")
        dimension, size = unit or (_UNITS[match["money"][0]] if match["money"] else ("", 1.0))
        found.append(Quantity(start, end, text[start:end].strip(), values, dimension, size))
        chars[start:end] = " " * (end - start)
    for at in range(len(found) - 2, -1, -1):  # in "70 to 80 °C" the unit is that of both
        one, other = found[at], found[at + 1]
        if not one.dimension and other.dimension and _JOINT.fullmatch(text, one.end, other.start):
            found[at] = Quantity(one.start, one.end, one.text, one.values, other.dimension, other.size)
    return found, "".join(chars)


def unit_of(name: str) -> tuple[str, float] | None:
    """Return the dimension of a unit and its size in the base unit; None if the name is unknown.

    A unit of one letter must be written as in the table: 3 D is not a time.
    """
    first, *others = name.casefold().split() or [""]
    if others and first != "per":
        name = "°F" if others[-1].startswith("f") else "°C"
    name = "".join(name.split())
    return _UNITS.get(name) or (_UNITS.get(name.casefold()) if len(name) > 1 else None)


def _values(digits: str, *, is_negative: bool) -> frozenset[float] | None:
    """Return the possible values of a number; None for a version or a key, which is not a number."""
    digits = re.sub(r"['’\s]", "", digits)
    if len(digits) > _MAX_DIGITS:
        return None
    readings = _readings(digits)
    return frozenset(-value if is_negative else value for value in readings) if readings else None


def _readings(digits: str) -> set[float]:
    marks = [char for char in digits if char in ".,"]
    if not marks:
        return {float(digits)}
    groups = re.split("[.,]", digits)
    are_thousands = len(groups[0]) <= 3 and not groups[0].startswith("0") and all(len(group) == 3 for group in groups[1:])
    if len(set(marks)) == 2 and marks.count(marks[-1]) == 1:
        return {float(f"{''.join(groups[:-1])}.{groups[-1]}")}
    if len(marks) > 1:
        return {float("".join(groups))} if are_thousands and len(set(marks)) == 1 else set()
    decimal = float(f"{groups[0]}.{groups[1]}")
    return {decimal, float("".join(groups))} if are_thousands else {decimal}
