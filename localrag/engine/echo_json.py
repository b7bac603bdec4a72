"""What the echo writes where it has to keep to a JSON schema: the first of everything that is allowed, and what it says as every text."""

from __future__ import annotations

import json

from localrag.engine import json_schema
from localrag.engine.json_tree import Array, Integer, Literals, Map, Node, Number, Object, Text, Union


def write(schema: str, said: str) -> str:
    """A JSON text that is valid under a schema. UsageError for one that is not supported."""
    return _write(json_schema.parse(json.loads(schema)), said)


def _write(node: Node, said: str) -> str:  # noqa: PLR0911  # one for each kind
    match node:
        case Literals(texts):
            return texts[0]
        case Text(shortest, longest):
            return json.dumps(said[:longest].ljust(shortest, "."), ensure_ascii=False)
        case Integer(low, high) | Number(low, high):
            return str(0 if low is None or low <= 0 <= (high or 0) else low if low > 0 else high)
        case Array(item, fewest, most):
            return f"[{', '.join([_write(item, said)] * max(fewest, min(1, most)))}]"
        case Object(properties):
            return f"{{{', '.join(f'{json.dumps(each.name)}: {_write(each.value, said)}' for each in properties)}}}"
        case Map(value, _):
            return f'{{"text": {_write(value, said)}}}'
        case Union(options):
            return _write(options[0], said)
