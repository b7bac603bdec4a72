"""Constrained decoding with llguidance: JSON under a schema, either a tool call or plain text, or text whose citations are all real.

llguidance enforces a JSON schema exactly or refuses it. localrag restricts it further, since small models may otherwise never stop: an
object with named properties has no others unless the schema allows them. Integers have at most 15 digits, and so does any run of digits
that something else may follow.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localrag.errors import EngineError, UsageError
from localrag.text.tool_calls import ID, NUMBER, CallMarkup, Fields
from localrag.types import CallRules, ToolSpec, schema_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_TAG = "[none]"
"""What an answer writes that no source supports."""
KELVIN = "\N{KELVIN SIGN}"
"""Equals a K where case is ignored."""
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
MAX_TEXT_LENGTH = 4096
"""Largest maxLength that is enforced for a text that is not in a JSON string."""
MAX_CALLS = 16
"""Most calls in an answer: small models may repeat a call without end."""
MAX_INTEGER = 10**15 - 1
"""Largest integer allowed. Some JSON parsers round larger ones."""
MAX_DIGITS = 15

_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line, with at most one space after a comma or colon. With free white space, a model can write it forever."""
_CALL_OR_TEXT = rf"""start: call | TEXT
call: json | "{CALL_OPENS}" /\n?/ json /\n?/ "{CALL_CLOSES}"
TEXT: /(?s:.*)/ & ~/(?s:(\{{|{CALL_OPENS}).*)/
json: %json """
_CITING_TEXT = rf"""start: ANSWER
ANSWER: TEXT (TAG TEXT)+
TEXT: /[^\[［【〔%s]*/ & ~/(?s:.*)[KkＫｋ{KELVIN}][BbＢｂ]([\s\x1c-\x1f]{{0,3}}\\?[#＃﹟♯№]|[:：]\p{{Nd}})(?s:.*)/
TAG: """
"""Text without an opening square bracket, and without any other spelling of a tag that citation.py reads, except in whole tags."""
_QUOTATION_MARKS = '"“”„‟＂'
"""In an answer that may quote, only the engine writes these, around what it copies."""
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that llguidance enforces. JSON Schema allows others to be treated as annotations."""
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]*)"')
_SPECIAL = b"\xff"
"""Prefix that tells llguidance that a token is not text."""


def grammar_of(schema: Mapping[str, Any] | str, *, or_text: bool = False) -> str:
    """Return the grammar of a JSON schema (or its text) for `Vocabulary.matcher`.

    With `or_text`, the answer may also be any text that begins neither with `{` nor with CALL_OPENS, and the JSON may be wrapped in
    CALL_OPENS and CALL_CLOSES, as many models are trained to call tools. UsageError for a schema that cannot be enforced.
    """
    return _grammar(schema_text(schema), or_text)


@functools.lru_cache(maxsize=64)
def grammar_of_citations(labels: tuple[str, ...], *, is_quoting: bool = False) -> str:
    """Return the grammar of a text that cites: at least one tag, `[label]` or NO_TAG, and no other spelling of a source anywhere.

    With `is_quoting`, it has no double quotation mark either.
    """
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy

    tags = " | ".join(json.dumps(tag) for tag in tags_of(labels))
    return str(LLMatcher.grammar_from_lark(_CITING_TEXT.replace("%s", _QUOTATION_MARKS if is_quoting else "") + tags))


def tags_of(labels: Iterable[str]) -> list[str]:
    """Return the tags that an answer may contain, as prompts show them, and NO_TAG."""
    return [*(f"[{label}]" for label in labels), NO_TAG]


@functools.lru_cache(maxsize=64)
def _grammar(text: str, or_text: bool) -> str:  # noqa: FBT001  # lru_cache
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy, and few answers are constrained

    schema = json.loads(text)
    try:
        is_open = any(_mixes_properties(each) for _, each in _subschemas(schema))
        exact = json.dumps({**_adapted(schema, is_open=is_open), "x-guidance": _JSON})
        grammar = LLMatcher.grammar_from_json_schema(exact)  # as text: a nested mapping could overflow the stack
    except (ValueError, RecursionError) as error:
        raise _refused(str(error), schema) from None
    if or_text:
        grammar = LLMatcher.grammar_from_lark(_CALL_OR_TEXT + exact)
    if problem := LLMatcher.validate_grammar(grammar):
        raise _refused(problem, schema)
    try:
        byte_vocabulary().matcher(grammar).allowed()
    except EngineError:
        raise _refused("no text is valid under it", schema) from None
    return grammar


def grammar_of_calls(schema: str, markup: CallMarkup, special_texts: Sequence[tuple[str, int]] = (), *, or_text: bool = False) -> str:
    """Return the grammar of an answer that makes calls in a model's own form.

    `schema` is that of a call, from `schema_of_calls`. `special_texts` are the control tokens of the vocabulary, which the form may
    contain. With `or_text`, the answer may also be any text, before calls or instead of them. UsageError for a schema that cannot be
    enforced.
    """
    controls = {text: token for text, token in special_texts if text}
    return _call_grammar(schema, markup, tuple(controls.items()), or_text)


@functools.lru_cache(maxsize=32)
def _call_grammar(schema: str, markup: CallMarkup, controls: tuple[tuple[str, int], ...], or_text: bool) -> str:  # noqa: FBT001  # lru_cache
    from llguidance import LLMatcher  # noqa: PLC0415  # heavy

    lark = _CallGrammar(json.loads(schema), markup, dict(controls)).text(or_text=or_text)
    grammar = str(LLMatcher.grammar_from_lark(lark))
    if problem := LLMatcher.validate_grammar(grammar):
        raise _refused(problem, json.loads(schema))
    return grammar


class _CallGrammar:
    """Writes the rules of calls in a markup."""

    def __init__(self, schema: Mapping[str, Any], markup: CallMarkup, controls: Mapping[str, int], prefix: str = "") -> None:
        self._schema = schema
        self._markup = markup
        self._prefix = prefix
        self._controls = controls
        ordered = sorted((text for text in controls if any(text in literal for literal in markup.literals)), key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, ordered), f"[{NUMBER}{ID}]"]))
        self._definitions = schema.get("$defs", {})
        self._calls = [each["properties"] for each in schema.get("anyOf", [schema])]
        self._rules: list[str] = []

    def text(self, *, or_text: bool) -> str:
        """Return the whole grammar."""
        self._write_calls()
        start = self._start() if or_text else f"start: {self._opener} {self._prefix}calls"
        return "\n".join([start, "ANY: /(?s:.*)/", *self._rules])

    @property
    def _opener(self) -> str:
        return self._literal(self._markup.opens + self._markup.start)

    def _write_calls(self) -> None:
        markup, prefix = self._markup, self._prefix
        names = [(name, each["arguments"]) for each in self._calls for name in each["name"].get("enum", [each["name"].get("const")])]
        for number, (name, arguments) in enumerate(names):
            before, end = self._literal(name + markup.named), self._literal(markup.end)
            self._rules.append(f"{prefix}call{number}: {before} {self._arguments(arguments, number)} {end}")
        again = "" if markup.between is None else f"({self._literal(markup.between + markup.start)} {prefix}call){{0,{MAX_CALLS - 1}}}"
        self._rules += [
            f"{prefix}call: {' | '.join(f'{prefix}call{number}' for number in range(len(names)))}",
            f"{prefix}calls: {prefix}call {again} {self._literal(markup.closes)}",
        ]

    def _start(self) -> str:
        """Return the rule of an answer that may be text."""
        markup, opener = self._markup, self._opener
        begins = markup.opens + markup.start
        if markup.text:
            return f"start: {opener} calls | {self._literal(markup.text)} ANY"
        if not begins:
            return "start: calls"
        if self._pieces.match(begins):
            return f"start: ANY {opener} calls | ANY"
        first = _mark_of(self._pieces.split(begins)[0])
        if not markup.is_anywhere:
            other = self._other_form()
            free = "|".join([f"{_in_regex(first[0])}(?s:.*)", *(f"{_in_regex(mark)}(?s:.*)" for mark, _ in other)])
            self._rules.append(f"FREE: /(?s:.*)/ & ~/{free}/")
            return f"start: {opener} calls | FREE" + "".join(f" | {rule}" for _, rule in other)
        self._rules += [f"FREE: /(?s:.*)/ & ~/(?s:.*{_in_regex(first)}.*)/", f"before[lazy]: ANY {json.dumps(first, ensure_ascii=False)}"]
        return f"start: before {self._literal(begins[len(first) :])} calls | FREE"

    def _other_form(self) -> list[tuple[str, str]]:
        """Write the rules of the other form. Return what it begins with and its rule; [] without one."""
        markup = self._markup.or_else
        if markup is None:
            return []
        other = _CallGrammar(self._schema, markup, self._controls, "other")
        first = _mark_of(other._pieces.split(markup.opens + markup.start)[0])
        if not first:
            return []
        other._write_calls()
        self._rules += other._rules
        return [(first, f"{other._opener} othercalls")]

    def _literal(self, text: str) -> str:
        """Return a sequence of strings and control tokens."""
        pieces, position = [], 0
        for match in self._pieces.finditer(text):
            pieces += [json.dumps(text[position : match.start()], ensure_ascii=False)] if match.start() > position else []
            pieces.append(_VARIABLES.get(match[0]) or f"<[{self._controls[match[0]]}]>")
            position = match.end()
        pieces += [json.dumps(text[position:], ensure_ascii=False)] if position < len(text) else []
        return " ".join(pieces) or '""'

    def _arguments(self, schema: Mapping[str, Any], number: int) -> str:
        """Return the name of the rule of a call's arguments."""
        name = f"{self._prefix}arguments{number}"
        if self._markup.fields is None:
            self._rules.append(f"{name}: {self._json(schema)}")
        else:
            self._with_fields(name, schema, self._markup.fields)
        return name

    def _json(self, schema: Mapping[str, Any] | bool) -> str:  # noqa: FBT001  # a JSON schema
        if not isinstance(schema, dict):
            schema = {}
        whole = {**schema, "$defs": self._definitions} if self._definitions else schema
        is_open = any(_mixes_properties(each) for _, each in _subschemas(whole))
        return f"%json {json.dumps({**_adapted(whole, is_open=is_open), 'x-guidance': _JSON})}"

    def _with_fields(self, name: str, schema: Mapping[str, Any], form: Fields) -> None:
        """Write the rules of fields: in the order of the schema, each at most once, and the required ones."""
        properties, required = schema.get("properties"), set(schema.get("required", ()))
        if not properties:
            key = f"{self._literal(form.key)} /[A-Za-z0-9_.$-]{{1,64}}/"
            between = self._literal(form.between)
            self._rules += [
                f"{name}: ({name}f ({between} {name}f)*)?",
                f"{name}f: {key} {self._text(name, form)} | {key} {self._other(form, {})}",
            ]
            return
        self._rules.append(f"{name}: {name}s0x0")
        keys = list(properties)
        for at, key in enumerate(keys):
            value = self._field(f"{name}v{at}", key, properties[key], form)
            for has_begun in (0, 1):
                between = self._literal(form.between) if has_begun else '""'
                skip = "" if key in required else f" | {name}s{at + 1}x{has_begun}"
                self._rules.append(f"{name}s{at}x{has_begun}: {between} {value} {name}s{at + 1}x1{skip}")
        self._rules += [f'{name}s{len(keys)}x{has_begun}: ""' for has_begun in (0, 1)]

    def _field(self, name: str, key: str, schema: object, form: Fields) -> str:
        schema = schema if isinstance(schema, dict) else {}
        before = self._literal(form.key + key)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices and is_text(schema):
            value = f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in choices)})"
            self._rules.append(f"{name}: {before} {self._literal(form.opens_text)} {value} {self._literal(form.closes_text)}")
        elif is_text(schema):
            self._rules.append(f"{name}: {before} {self._text(name, form, schema.get('maxLength'))}")
        else:
            self._rules.append(f"{name}: {before} {self._other(form, schema)}")
        return name

    def _text(self, name: str, form: Fields, max_length: object = None) -> str:
        """Return the rule of a text: it ends at the first text that closes it."""
        text = "ANY"
        if isinstance(max_length, int) and 0 < max_length <= MAX_TEXT_LENGTH:
            text = f"{name.upper()}TEXT"
            self._rules.append(f"{text}: /(?s:.{{0,{max_length}}})/")
        opens, first = self._literal(form.opens_text), self._pieces.split(form.closes_text)[0]
        if not first:
            return f"{opens} {text} {self._literal(form.closes_text)}"
        self._rules.append(f"{name}t[lazy]: {text} {json.dumps(first, ensure_ascii=False)}")
        return f"{opens} {name}t {self._literal(form.closes_text[len(first) :])}"

    def _other(self, form: Fields, schema: Mapping[str, Any]) -> str:
        return f"{self._literal(form.opens_json)} {self._json(schema)} {self._literal(form.closes_json)}"


def is_text(schema: object) -> bool:
    """Tell whether the values of a parameter are texts, so that fields hold them as they are."""
    if not isinstance(schema, dict):
        return False
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return schema.get("type") == "string" or bool(choices and all(isinstance(each, str) for each in choices))


_VARIABLES = {NUMBER: "/[0-9]{1,3}/", ID: "/[A-Za-z0-9]{9}/"}


def _mark_of(text: str) -> str:
    """Return the tag that a text begins with, or else all of it: text of an answer may not contain it."""
    found = re.match(r"<[^<>\s]+>|\[[A-Z_]+\]", text)
    return found[0] if found else text


def _in_regex(text: str) -> str:
    """Return a regular expression for a text, between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _map_children(schema: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a copy with each direct subschema replaced by `change(path, subschema)`, where `path` is relative to `schema`."""
    changed = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            changed[name] = {key: change(f"/{name}/{key}", each) for key, each in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            changed[name] = [change(f"/{name}/{at}", each) for at, each in enumerate(value)]
        elif name in _SCHEMAS:
            changed[name] = change(f"/{name}", value)
    return changed


def _subschemas(schema: object, place: str = "#") -> list[tuple[str, dict[str, Any]]]:
    """Return a schema and all schemas nested in it as (JSON pointer, schema) pairs."""
    if not isinstance(schema, dict):
        return []
    schemas = [(place, schema)]
    _map_children(schema, lambda below, each: schemas.extend(_subschemas(each, place + below)))
    return schemas


def _mixes_properties(schema: Mapping[str, Any]) -> bool:
    """Whether an object combines the properties of several schemas, so that no single schema lists them all."""
    return "allOf" in schema or ("properties" in schema and not schema.keys().isdisjoint(("anyOf", "oneOf", "$ref")))


def _adapted(schema: Any, *, is_open: bool) -> Any:  # noqa: ANN401  # JSON
    """Return the schema with bounded integers and without annotation formats; unless `is_open`, forbid unnamed properties."""
    if not isinstance(schema, dict):
        return schema
    new_schema = _map_children(schema, lambda _, each: _adapted(each, is_open=is_open))
    new_schema.pop("x-guidance", None)  # llguidance's own options, which could loosen the schema
    if "json-schema.org/" not in str(new_schema.get("$schema", "")):
        new_schema.pop("$schema", None)  # an unknown dialect would be an error
    if new_schema.get("format") not in _FORMATS:
        new_schema.pop("format", None)
    if "properties" in new_schema and "patternProperties" not in new_schema and not is_open:
        new_schema.setdefault("additionalProperties", False)
    if new_schema.get("type") == "integer":
        new_schema = ({} if "exclusiveMinimum" in new_schema else {"minimum": -MAX_INTEGER}) | new_schema
        new_schema = ({} if "exclusiveMaximum" in new_schema else {"maximum": MAX_INTEGER}) | new_schema
    return new_schema


def _refused(reason: str, schema: object) -> UsageError:
    """Return a one-line error, whatever characters the schema's names contain."""
    unknown = _UNIMPLEMENTED.search(reason)
    place = ""
    if "recursion" in reason:
        reason = "it is nested too deeply"
    elif unknown:
        reason = f"{unknown[1]} is not supported"
        place = next((place for place, each in _subschemas(schema) if unknown[1] in each), "")
    message, place = (json.dumps(text)[1:-1] for text in (" ".join(reason.split()), place))
    message, place = (text if len(text) <= 240 else f"{text[:160]}…{text[-79:]}" for text in (message, place))
    return UsageError(f"The JSON schema cannot be used: {message}{f' (at {place})' if place else ''}.", path=place or None)


class Vocabulary:
    """A model's vocabulary in llguidance's form. Create it once per model: it takes about 0.3 s for 49,000 tokens.

    `pieces` holds the bytes of each token, empty for tokens that are not text; `encode` tokenizes a text.
    """

    def __init__(self, pieces: Sequence[bytes], end_ids: Sequence[int], encode: Callable[[str], Sequence[int]]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  # heavy

        if not end_ids:
            raise EngineError("This model has no end token, so its answers cannot be constrained by a grammar.")
        self.end_ids = tuple(end_ids)
        tokens = _Tokens([piece or _SPECIAL + b"%d" % number for number, piece in enumerate(pieces)], end_ids[0], encode)
        self.pieces = pieces
        self.digits = frozenset(number for number, piece in enumerate(pieces) if piece[:1].isdigit())
        """Tokens that begin with a digit."""
        self.openers = frozenset(number for number, piece in enumerate(pieces) if b"[" in piece)
        """Tokens with an opening bracket."""
        self.starters = frozenset(number for number in self.openers if pieces[number].lstrip().startswith(b"["))
        """Tokens with nothing but white space before their opening bracket."""
        self.no_words = frozenset((*end_ids, *self.openers, *(number for number, piece in enumerate(pieces) if b"\n" in piece)))
        """Tokens that cannot follow a bare tag: ends, opening brackets and line ends."""
        self.letter = pieces.index(b"x") if b"x" in pieces else None
        """A token that is allowed wherever any text is."""
        self.tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(end_ids))

    def citing_matcher(
        self, labels: tuple[str, ...], max_tokens: int, quotes: Iterable[tuple[str, tuple[int, ...]]] = (), *, is_first: bool = False
    ) -> Matcher:
        """Return a matcher for an answer that cites these labels and may quote; see CitingMatcher."""
        return CitingMatcher(self, labels, max_tokens, dict(quotes), is_first=is_first)

    def calling_matcher(self, rules: CallRules, labels: tuple[str, ...], max_tokens: int, *, is_first: bool = False) -> Matcher:
        """Return a matcher for an answer that calls tools by these rules, or cites these labels."""
        cites = CitingMatcher(self, labels, max_tokens, is_first=is_first)
        opener = rules.opener[:1].encode()
        openers = rules.opener_ids or frozenset(at for at, piece in enumerate(self.pieces) if piece.lstrip()[:1] == opener)
        return CallingMatcher(self, rules.grammar, cites, openers, is_either=not rules.opener_ids)

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher for one sequence. EngineError for a grammar that llguidance refuses."""
        return Matcher(self, grammar)


class _Tokens:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens, self.eos_token_id, self._encode = tokens, eos_token_id, encode
        self.special_token_ids = [number for number, token in enumerate(tokens) if token.startswith(_SPECIAL)]

    def __call__(self, text: bytes) -> list[int]:
        return list(self._encode(text.decode("utf-8", "replace")))


class Matcher:
    """The position of one sequence in a grammar. When the text is complete and nothing can follow, only end tokens are allowed."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # heavy

        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        self._num_digits = 0
        self._check()

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        if self._matcher.is_stopped() or (self._num_digits >= MAX_DIGITS and token in self._vocabulary.digits):
            return bool(self.allowed()[token])
        return bool(self._matcher.validate_tokens([token]))

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask of tokens that may follow: bool, one entry per token. EngineError if the grammar allows none."""
        import numpy as np  # noqa: PLC0415  # heavy

        vocabulary = self._vocabulary
        if self._matcher.is_stopped():
            mask = np.zeros(len(vocabulary.pieces), np.bool_)
            mask[list(vocabulary.end_ids)] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=len(vocabulary.pieces), bitorder="little").view(np.bool_)
        if self._num_digits >= MAX_DIGITS and not (vocabulary.letter is not None and mask[vocabulary.letter]):
            others = mask.copy()
            others[list(vocabulary.digits)] = False
            mask = others if others.any() else mask
        return mask

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()
        piece = self._vocabulary.pieces[token]
        num_last = len(piece) - len(piece.rstrip(b"0123456789"))
        self._num_digits = num_last + (self._num_digits if num_last == len(piece) else 0)

    def take_copied(self) -> tuple[int, ...]:
        """Return the tokens to append after the last accepted one, once. They need not be accepted."""
        return ()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(
                f"The grammar of this answer cannot be enforced: {' '.join(self._matcher.get_error().split())[:240]}",
                hint="Use a simpler JSON schema.",
            )


class CitingMatcher(Matcher):
    """A position in the grammar of `grammar_of_citations`, for an answer of at most `max_tokens` tokens.

    The answer is never cut inside a tag, and it has one however it ends: where the model would end it without, or where only the room
    for a tag is left, only tokens that open a tag are allowed. With too few tokens for any tag, there is none. With `is_first`, a tag
    comes before anything else, and unless it is NO_TAG, words follow it on its line: small models repeat a bare tag.

    `quotes` maps further labels to the tokens of their quotes. When such a tag closes, `take_copied` returns these tokens; the position
    stays after the tag, where any text may follow. Such a tag can be written once, and only while there is room for the tag and its
    quote, so no quote is cut either. Double quotation marks cannot be written, so what stands between two is copied.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        labels: tuple[str, ...],
        max_tokens: int,
        quotes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        quotes = quotes or {}
        super().__init__(vocabulary, grammar_of_citations((*labels, *quotes), is_quoting=bool(quotes)))
        self._room = max_tokens
        self._reserved = max(len(tag.encode()) for tag in tags_of(labels))  # at most as many tokens as bytes
        self._in_tag = self._has_tag = self._must_open = False
        self._must_start = self._is_bare = is_first and max_tokens >= self._reserved
        self._copies: dict[bytes, tuple[int, ...]] = {tag.encode(): () for tag in tags_of(labels)}
        self._copies |= {f"[{label}]".encode(): token_ids for label, token_ids in quotes.items()}
        self._tag = b""
        self._copied: tuple[int, ...] = ()

    def allows(self, token: int) -> bool:
        vocabulary = self._vocabulary
        if self._must_start and token not in vocabulary.starters:
            return False
        if self._is_bare and self._has_tag and not self._in_tag and token in vocabulary.no_words:
            return False
        if token in vocabulary.end_ids and not self._has_tag:
            self._must_open = not self._in_tag and self._room >= self._reserved
            return self._room < self._reserved and not self._in_tag
        if not self._in_tag:
            if self._room < self._reserved:
                return token not in vocabulary.openers and super().allows(token)
            if self._room == self._reserved and not self._has_tag:
                return token in vocabulary.openers and super().allows(token) and self._fits(token)
        return super().allows(token) and self._fits(token)

    def allowed(self) -> NDArray[np.bool_]:
        mask = super().allowed().copy()
        if self._in_tag:
            return self._fitting(mask, mask.nonzero()[0])
        openers = list(self._vocabulary.starters if self._must_start else self._vocabulary.openers)
        if self._is_bare and self._has_tag:
            mask[list(self._vocabulary.no_words)] = False
            return mask
        if self._room < self._reserved:
            mask[openers] = False
            return mask
        mask = self._fitting(mask, openers)
        if not self._has_tag and (self._must_start or self._must_open or self._room == self._reserved):
            opening = mask.copy()
            opening[:] = False
            opening[openers] = mask[openers]
            mask = opening if opening.any() else mask
        return mask

    def accept(self, token: int) -> None:
        if token in self._vocabulary.end_ids:
            return
        super().accept(token)
        piece = self._vocabulary.pieces[token]
        self._room -= 1
        self._must_start = self._must_open = False
        tag = (self._tag + piece)[max(0, (self._tag + piece).rfind(b"[")) :]
        opens, closes = piece.rfind(b"["), piece.rfind(b"]")
        self._has_tag = self._has_tag or (closes >= 0 and (self._in_tag or 0 <= piece.find(b"[") < closes))
        self._in_tag = opens > closes or (self._in_tag and closes < 0)
        self._tag = tag if self._in_tag else b""
        if self._has_tag and not self._in_tag:
            self._is_bare = self._is_bare and not tag.startswith(NO_TAG.encode()) and not _has_word(piece[closes + 1 :])
        if closes >= 0 and self._copies.get(tag):
            self._copied = self._copies.pop(tag)
            self._is_bare = False
            self._room -= len(self._copied)
            self._num_digits = 0  # a quotation mark comes last

    def take_copied(self) -> tuple[int, ...]:
        copied, self._copied = self._copied, ()
        return copied

    def _fitting(self, mask: NDArray[np.bool_], tokens: Iterable[int]) -> NDArray[np.bool_]:
        """Return the mask without those of these tokens after which a tag would not fit."""
        mask[[token for token in tokens if mask[token] and not self._fits(token)]] = False
        return mask

    def _fits(self, token: int) -> bool:
        """Whether the tags that a token begins, continues or closes fit in the room left, with their quotes. A quote follows its tag."""
        text, room = self._tag + self._vocabulary.pieces[token], self._room - 1
        while (start := text.find(b"[")) >= 0:
            text = text[start:]
            end = text.find(b"]") + 1
            if not end:
                return any(tag.startswith(text) and len(tag) - len(text) + len(copy) <= room for tag, copy in self._copies.items())
            copy = self._copies.get(text[:end])
            if copy is None or (copy and (end < len(text) or len(copy) > room)):
                return False
            text = text[end:]
            if self._is_bare and copy == () and (b"[" in text or b"\n" in text):
                return False
        return True


def _has_word(piece: bytes) -> bool:
    """Whether a piece of text has a letter or a digit, or a part of one outside of ASCII."""
    return any(byte >= 0x80 or chr(byte).isalnum() for byte in piece)


class CallingMatcher(Matcher):
    """A position in an answer that calls tools, or is text that cites.

    `grammar` allows calls and any text; `cites` limits the text. A token of `openers` begins a call, which ends the text. With
    `is_either`, an answer is calls or text, so only its first token can begin a call.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, cites: CitingMatcher, openers: frozenset[int], *, is_either: bool) -> None:
        super().__init__(vocabulary, grammar)
        self._cites: CitingMatcher | None = cites
        self._openers = openers
        self._is_either = is_either

    def allows(self, token: int) -> bool:
        return super().allows(token) and (self._cites is None or token in self._openers or self._cites.allows(token))

    def allowed(self) -> NDArray[np.bool_]:
        mask = super().allowed()
        if self._cites is None:
            return mask
        text = self._cites.allowed()
        text[list(self._openers)] = True
        return mask & text

    def accept(self, token: int) -> None:
        super().accept(token)
        if self._cites is None:
            return
        if token in self._openers:
            self._cites = None
            return
        self._cites.accept(token)
        if self._is_either:
            self._openers = frozenset()


@functools.cache
def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary with each byte as a token (0 to 255) and two control tokens, the second of which is the end token."""
    return Vocabulary([*(bytes([value]) for value in range(256)), b"", b""], [257], lambda text: list(text.encode()))


def schema_of_calls(specs: Iterable[ToolSpec], strict: Collection[str]) -> str:
    """Return the JSON schema of a call to any of these tools, simplified if it is too large for a grammar.

    UsageError if the parameters of a tool named in `strict` cannot be enforced.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        parameters, own = _hoisted(spec.parameters, f"{number}-")
        try:
            _check_arguments(spec.name, parameters, own)
        except UsageError:
            if spec.name in strict:
                raise
            parameters, own = {"type": "object"}, {}
        calls.append(_call({"const": spec.name}, parameters))
        definitions |= own
    text = json.dumps({"anyOf": calls, "$defs": definitions})
    try:
        grammar_of(text)
    except UsageError:
        if strict:
            raise
        text = json.dumps(_call({"enum": [spec.name for spec in specs]}, {"type": "object"}))
    return text


def _check_arguments(name: str, parameters: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    """Raise UsageError if a grammar cannot enforce the parameters."""
    if parameters.get("type") != "object":
        raise UsageError(f"The parameters of the tool {name} are not an object.", hint='Give a JSON schema of type "object".')
    grammar_of({**parameters, "$defs": definitions})


def _call(name: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": name, "arguments": arguments}, "required": ["name", "arguments"]}


def _hoisted(parameters: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a schema to embed in another, and its definitions under names that begin with `prefix`, for the outer schema."""
    renamed = json.loads(json.dumps(parameters), object_hook=lambda each: _renamed(each, prefix))
    groups = [renamed.pop(key, {}) for key in ("$defs", "definitions")]
    own = {f"{prefix}{name}": each for group in groups if isinstance(group, dict) for name, each in group.items()}
    return renamed, own


def _renamed(schema: dict[str, Any], prefix: str) -> dict[str, Any]:
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")):
        schema["$ref"] = f"#/$defs/{prefix}{ref.split('/', 2)[2]}"
    return schema
