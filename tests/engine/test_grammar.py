"""Hostile schemas: each becomes a grammar or one clear error, in bounded time and memory, and nothing takes the process down."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from localrag.engine.grammar import byte_vocabulary, grammar_of
from localrag.errors import EngineError, UsageError
from localrag.types import schema_text
from tests.json_schemas import NAMES, random_schema, refusal

NUM_SCHEMAS = int(os.environ.get("LOCALRAG_TEST_SCHEMAS", "400"))  # 1,000 held too
PATTERNS = (
    "^(a*)*$",
    "(x+x+)+y",
    "(a|aa|aaa|aaaa)*b",
    "((a{1,100}){1,100}){1,100}",
    "(((((((a?){20}){20}){20}){20}){20}){20}",
    "a{99999999}",
    r"[\s\S]{0,100000}x",
    "|".join("a" * length for length in range(1, 500)),
    r"\p{L}+\P{L}*",
    "(?i)abc",
    r"[^\x00-\x{10FFFF}]",
    "(.*a){30}",
    ".*" * 50 + "b",
    "(?P<n>a)",
    "(?=a)b",
    r"(a)\1",
    "[",
    "a" * 50_000,
)


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
        lambda: nested(rng.choice([10, 16, 60, 300, 20_000])),
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
        lambda: {"enum": list(range(rng.choice([1, 256, 257, 10_000])))},
        lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
        lambda: {"type": "object", "properties": {chr(rng.randrange(0x11_0000)) * n: {"type": "null"} for n in range(64)}},
    ]
    return chosen[seed % len(chosen)]()


def run_hostile(first, last):
    """In a child: a text of up to 64 bytes is written under each schema, or the schema is refused; prints how often it was which."""
    counts = {"accepted": 0, "refused": 0}
    for seed in range(first, last):
        schema = hostile(seed)
        try:
            grammar = grammar_of(schema)
        except UsageError as error:
            assert len(error.message.splitlines()) == 1, seed
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        matcher, rng = byte_vocabulary().matcher(grammar), random.Random(seed)
        try:
            for _ in range(64):
                matcher.accept(rng.choice(matcher.allowed().nonzero()[0].tolist()))
        except EngineError as error:  # what is too much for its limits, and what cannot come to an end
            assert len(str(error).splitlines()) == 1, seed
    status = Path("/proc/self/status")  # ru_maxrss would begin with the memory of the process that started this one
    peak = int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) // 1024 if status.exists() else 0
    print(json.dumps({**counts, "peak_mib": peak}))


def test_hundreds_of_hostile_schemas():
    code = f"from tests.engine.test_grammar import run_hostile; run_hostile(0, {NUM_SCHEMAS})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["accepted"] + report["refused"] == NUM_SCHEMAS
    assert report["accepted"] > NUM_SCHEMAS / 5
    assert report["refused"] > NUM_SCHEMAS / 10
    assert report["peak_mib"] < 500


def test_a_schema_of_schemas_stays_within_bounds():
    assert "nested" in refusal(nested(200)).message
    assert schema_text(nested(60)).count("{") > 60
    assert grammar_of(nested(60))
