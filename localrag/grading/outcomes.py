"""What came of a question: all that a grade needs, as it is kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from localrag.passages import Citation


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage as it was supplied to the model: the label that cites it, the document it is of, and its words."""

    label: str
    source: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`text` is what is said in the end, without what was thought; `citations` are its own, `passages` what the model was shown.

    `prompt` is a digest of the tokens that were sent, where one prompt was. `evaluated_tokens` are those of all prompts that were not
    taken over from another prompt of the same question. Without an answer, `error` names what it failed by, and `error_text` says it.
    """

    text: str = ""
    citations: tuple[Citation, ...] = ()
    passages: tuple[Passage, ...] = ()
    prompt: str = ""
    finish_reason: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    evaluated_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    error_text: str = ""

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON. What went wrong is there only where something did."""
        data = asdict(self)
        return {name: value for name, value in data.items() if value or name not in ("error", "error_text")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Of what `to_dict` gave. TypeError or KeyError for what it cannot have given."""
        given = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        for each in fields(cls):
            if each.name in given and not isinstance(given[each.name], _KINDS.get(each.name, (str,))):
                raise TypeError(f"{each.name} is a {type(given[each.name]).__name__}")
        given["citations"] = tuple(Citation(str(each["label"]), bool(each["supplied"])) for each in given.get("citations", ()))
        given["passages"] = tuple(Passage(*(str(each[name]) for name in Passage.__slots__)) for each in given.get("passages", ()))
        return cls(**given)


_NUMBERS = ("prompt_tokens", "evaluated_tokens", "completion_tokens")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "citations": (list, tuple),
    "passages": (list, tuple),
    "seconds": (int, float),
    **dict.fromkeys(_NUMBERS, (int,)),
}
