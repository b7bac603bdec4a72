"""From schemas to grammars: each is exact, llama.cpp accepts it, and nothing takes the process down."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.decoding import schema_text
from localrag.engine.grammar import MAX_GRAMMAR_BYTES, _decimal, _natural, _signed, grammar_of, longest_chars
from localrag.engine.library import library
from localrag.engine.llama import LlamaModel
from localrag.errors import UsageError
from tests.gguf_files import write_vocab
from tests.json_schemas import NAMES, random_schema, refusal


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    model = LlamaModel(write_vocab(tmp_path_factory.mktemp("vocab") / "vocab.gguf"), vocab_only=True)
    yield model
    model.close()


def is_accepted(model, grammar):
    handle = library().llama_sampler_init_grammar(model.vocab, grammar.encode("ascii"), b"root")
    if handle:
        library().llama_sampler_free(handle)
    return bool(handle)


def matches(expression, text):
    """Whether digits match a grammar of literals, groups, classes and counts, read as a regular expression."""
    return re.fullmatch(re.sub(r'"([^"]*)"', lambda m: re.escape(m[1]), expression).replace(" ", ""), text) is not None


def test_a_grammar_reads_as_its_schema():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "boolean"}},
        "required": ["b"],
    }
    assert grammar_of(schema).splitlines() == [
        "root ::= r8",
        r'r0 ::= "true" | "false"',
        r'r1 ::= "\"b\":" " "? r0',
        r'r2 ::= "," " "? r1',
        r'r3 ::= [\x20-\x21\x23-\x5B\x5D-\uD7FF\uE000-\U0010FFFF] | "\\" ["\\/bfnrt]',
        r'r4 ::= "\"" r3{0,3} "\""',
        r'r5 ::= "\"a\":" " "? r4',
        "r6 ::= r5 r2",
        "r7 ::= r6 | r1",
        r'r8 ::= "{" r7 "}"',
    ]


def test_random_schemas_give_grammars_that_llama_cpp_accepts(vocabulary):
    for seed in range(300):
        schema = random_schema(random.Random(seed))
        grammar = grammar_of(schema)
        assert grammar == grammar_of(json.dumps(schema)), seed
        assert len(grammar) <= MAX_GRAMMAR_BYTES + 100
        assert "\0" not in grammar
        assert is_accepted(vocabulary, grammar), (seed, schema)


@settings(deadline=None, max_examples=150)
@given(st.integers(-2000, 2000), st.integers(0, 2500), st.data())
def test_whole_numbers_are_bounded_exactly(low, width, data):
    high = low + width
    expression = _signed(low, high)
    for value in {low, high, low - 1, high + 1, 0, 1, -1, data.draw(st.integers(low - 3000, high + 3000))}:
        assert matches(expression, str(value)) == (low <= value <= high), (low, high, value)
    assert not matches(expression, "007")
    assert not matches(expression, "-0")


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_long_numbers_are_bounded_exactly(a, b, value):
    low, high = min(a, b), max(a, b)
    expression = _natural(low, high)
    for each in (value, low, high, low - 1, high + 1):
        assert matches(expression, str(each)) == (low <= each <= high)


@settings(deadline=None, max_examples=150)
@given(st.integers(-40, 40), st.integers(0, 60), st.decimals(-50, 110, places=2))
def test_numbers_are_bounded_exactly(low, width, value):
    expression = _decimal(low, low + width)
    for text in (str(value), str(low), f"{low}.0", f"{low + width}.00", f"{low + width}.01", f"-{abs(low)}.5"):
        inside = low <= float(text) <= low + width
        assert matches(expression, text) == inside or (inside and float(text) == 0), (low, width, text)


def test_the_longest_text_is_known():
    assert longest_chars({"type": "string", "maxLength": 5}) == 12
    assert longest_chars({"type": "integer", "minimum": -10, "maximum": 5}) == len("-10")
    assert longest_chars({"type": "number", "minimum": 0, "maximum": 1}) == 17
    assert longest_chars({"enum": ["a", None]}) == len("null")
    assert longest_chars({"type": "array", "items": {"type": "null"}, "maxItems": 3}) == len("[null, null, null]")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": 1}}}
    assert longest_chars(schema) == len('{"a": false, "b": 1}')


def nested(depth, leaf=None):
    made = leaf or {"type": "null"}
    for i in range(depth):
        made = {"type": "array", "items": made} if i % 2 else {"type": "object", "properties": {"a": made}}
    return made


def wide(count):
    """Strings of ever other lengths: each has a rule of its own that llama.cpp unrolls."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": count + i} for i in range(64)}}


def doubling(depth):
    """Each level names the one below it twice: 2^depth parts, and as many ways to read the same text."""
    defs = {"d0": {"type": "string"}}
    for i in range(1, depth):
        ref = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {"anyOf": [{"type": "array", "items": ref, "maxItems": n} for n in (1, 2)]}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": defs}


def fanned(depth):
    """A few lines that stand for 16^depth parts."""
    defs = {"d0": {"type": "string"}}
    for i in range(1, depth):
        defs[f"d{i}"] = {"type": "object", "properties": {f"p{n}": {"$ref": f"#/$defs/d{i - 1}"} for n in range(16)}}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": defs}


def junk(rng, depth=4):
    """Any JSON that looks somewhat like a schema."""
    words = ["type", "items", "properties", "required", "anyOf", "oneOf", "enum", "const", "$ref", "$defs", "minLength", "maxLength"]
    words += ["minimum", "maximum", "minItems", "maxItems", "pattern", "not", "additionalProperties", "if", "description", *NAMES]
    values = [
        "string",
        "object",
        "array",
        "integer",
        "#/$defs/a",
        -1,
        0,
        3,
        2**63,
        10**300,
        0.1,
        1e308,
        True,
        None,
        '"',
        "\\",
        "\0",
        "^(a*)*$",
    ]
    roll = rng.random()
    if depth == 0 or roll < 0.3:
        return rng.choice(values)
    if roll < 0.45:
        return [junk(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(words): junk(rng, depth - 1) for _ in range(rng.randint(0, 5))}


def broken(rng):
    """A supported schema with one thing in it made wrong."""
    schema = random_schema(rng)
    places = [schema]
    for each in places:
        places += [value for value in (each.values() if isinstance(each, dict) else each) if isinstance(value, dict | list) and value]
    place = rng.choice(places)
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    place[key] = junk(rng, 2)
    return schema


def hostile(seed):
    rng = random.Random(seed)
    chosen = [
        lambda: junk(rng),
        lambda: broken(rng),
        lambda: random_schema(rng, 5),
        lambda: nested(rng.choice([10, 16, 17, 300, 20_000])),
        lambda: wide(rng.choice([1, 500, 1990, 7000])),
        lambda: doubling(rng.randint(2, 16)),
        lambda: {"enum": ["".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x11_0000)])) for _ in range(9)) for _ in range(40)]},
        lambda: {
            "type": "string",
            "minLength": rng.choice([0, 999, 1000, 1001, 1999, 2000, 8000]),
            "maxLength": rng.choice([1999, 2000, 8000]),
        },
        lambda: {"type": "array", "items": nested(rng.randint(1, 14), {"type": "string"}), "minItems": 256},
        lambda: {"type": "integer", "minimum": rng.randint(-(10**17), 10**17), "maximum": rng.randint(-(10**17), 10**17)},
        lambda: {"enum": list(range(rng.choice([1, 256, 257, 100_000])))},
        lambda: {"type": "object", "properties": {chr(rng.randrange(0x11_0000)) * n: {"type": "null"} for n in range(64)}},
    ]
    return chosen[seed % len(chosen)]()


def run_hostile(path, first, last):
    """In a child: each schema is a grammar that llama.cpp accepts, or a UsageError; prints how often it was which."""
    model = LlamaModel(path, vocab_only=True)
    counts, slowest = {"accepted": 0, "refused": 0}, 0.0
    for seed in range(first, last):
        schema = hostile(seed)
        started = time.process_time()
        try:
            grammar = grammar_of(schema)
        except UsageError as error:
            assert len(error.message.splitlines()) == 1, seed
            counts["refused"] += 1
        else:
            assert is_accepted(model, grammar), (seed, schema)
            counts["accepted"] += 1
        slowest = max(slowest, time.process_time() - started)
    status = Path("/proc/self/status")  # ru_maxrss would begin with the memory of the process that started this one
    peak = int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) // 1024 if status.exists() else 0
    print(json.dumps({**counts, "slowest_s": round(slowest, 3), "peak_mib": peak}))


def test_a_thousand_hostile_schemas(tmp_path):
    path = write_vocab(tmp_path / "vocab.gguf")
    code = (
        "import sys; from pathlib import Path; from tests.engine.test_grammar import run_hostile; run_hostile(Path(sys.argv[1]), 0, 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "error parsing grammar" not in done.stderr
    report = json.loads(done.stdout)
    print(report)
    assert report["accepted"] + report["refused"] == 1000
    assert report["accepted"] > 200
    assert report["refused"] > 200
    assert report["slowest_s"] < 2
    assert report["peak_mib"] < 500


def test_a_schema_of_schemas_stays_within_bounds():
    assert "alternatives" in refusal(doubling(8)).message
    assert "nested" in refusal(doubling(16)).message
    assert "parts" in refusal(fanned(4)).message
    assert "alternatives" in refusal({"anyOf": [{"enum": [f"{i}-{j}" for j in range(200)]} for i in range(4)]}).message
    assert "add up to" in refusal(wide(1900)).message
    assert "nested" in refusal(nested(17)).message
    assert schema_text(nested(16)).count("{") > 16
