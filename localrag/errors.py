"""All exceptions that localrag raises on purpose.

    LocalragError
    ├── UsageError                  2   a command or function was called incorrectly
    ├── ConfigError                 3   models.toml or the environment is invalid
    │   └── BundleError                 an air-gap bundle cannot be made or used
    ├── ModelError                  4   a model cannot be used
    │   ├── ModelNotFoundError          not in the catalogue, or not on this machine
    │   ├── ModelFileError              the file is damaged, unsupported or changed
    │   └── TemplateError               the chat template is missing, unsafe or unusable
    ├── BudgetExceededError         5   the sections that cannot be cut do not fit
    ├── TimeLimitError              5   not even the shortest answer fits the time limit
    ├── KnowledgeBaseError          6   a knowledge base cannot be used
    │   ├── KnowledgeBaseNotFoundError
    │   ├── KnowledgeBaseBusyError      another process is indexing
    │   └── UnanswerableError           it probably does not answer the question
    ├── EngineError                 7   llama.cpp failed, or ran out of memory
    └── InterruptedRunError       130   the user stopped the run

The number is the exit code of the command line. Each error has a one-line message, a hint that says how to fix the problem, and
the numbers involved, so that scripts can read them without parsing text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class LocalragError(Exception):
    """Base class. `message` says what went wrong, `hint` how to fix it, and `numbers` holds JSON values by name."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **numbers: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.numbers = numbers

    def to_dict(self) -> dict[str, object]:
        """Return the object under `"error"` in `--json` output."""
        return {"type": type(self).__name__, "message": self.message, "hint": self.hint, **self.numbers}


class UsageError(LocalragError):
    """A command or a function was called incorrectly."""

    exit_code = 2


class ConfigError(LocalragError):
    """A models.toml file or the environment is invalid."""

    exit_code = 3


class BundleError(ConfigError):
    """An air-gap bundle cannot be made or used."""


class ModelError(LocalragError):
    """A model cannot be used."""

    exit_code = 4


class ModelNotFoundError(ModelError):
    """A model is not in models.toml, or not on this machine."""


class ModelFileError(ModelError):
    """A model file is damaged, unsupported or changed."""


class TemplateError(ModelError):
    """A chat template is missing, unsafe or unusable."""


class BudgetExceededError(LocalragError):
    """The minimums of the sections add up to more than the window. `sections` maps each name to its minimum in tokens.

    `role` names the council member whose prompt is too long, if there are several prompts.
    """

    exit_code = 5

    def __init__(self, window: int, sections: dict[str, int], *, hint: str | None = None, role: str | None = None) -> None:
        needed = sum(sections.values())
        parts = ", ".join(f"{name} {tokens}" for name, tokens in sorted(sections.items()) if tokens)
        super().__init__(
            f"The prompt{f' of {role}' if role else ''} needs at least {needed} tokens ({parts}), but the window holds {window}.",
            hint=hint or f"Use a window of {needed} tokens or more (--ctx), a model with a longer context, or a shorter text.",
            window=window,
            needed=needed,
            over=needed - window,
            sections=sections,
            **({"role": role} if role else {}),
        )

    def of(self, role: str, *, hint: str | None = None) -> BudgetExceededError:
        """Return the same error for the prompt of a role, with a new `hint` if one is given."""
        return BudgetExceededError(self.numbers["window"], self.numbers["sections"], hint=hint or self.hint, role=role)  # type: ignore[arg-type]  # as given


class TimeLimitError(LocalragError):
    """Even the shortest answer takes longer than the limit. Both times are in seconds."""

    exit_code = 5

    def __init__(self, max_seconds: float, needed_s: float) -> None:
        super().__init__(
            f"Even a short answer takes about {needed_s:.1f} s here, and the limit is {max_seconds:g} s.",
            hint=f"Allow {needed_s + 1:.0f} s or more (--max-seconds), or use a smaller model or a shorter text.",
            max_seconds=max_seconds,
            needed_s=round(needed_s, 2),
        )


class KnowledgeBaseError(LocalragError):
    """A knowledge base cannot be used."""

    exit_code = 6


class KnowledgeBaseNotFoundError(KnowledgeBaseError):
    """No knowledge base has that name."""


class KnowledgeBaseBusyError(KnowledgeBaseError):
    """Another process is indexing into the knowledge base."""


class UnanswerableError(KnowledgeBaseError):
    """The knowledge bases probably do not answer a question that asks for an error in that case (`unanswerable`).

    `answerable` is the probability that they do, below `threshold`. `nearest` are the labels of the nearest passages.
    """

    def __init__(self, answerable: float, threshold: float, nearest: Sequence[str]) -> None:
        super().__init__(
            f"The sources do not answer this question: the probability is {answerable:.2f}, below {threshold:.2f}.",
            hint="Ask in other words, add documents, or use --unanswerable answer.",
            answerable=round(answerable, 4),
            threshold=round(threshold, 4),
            nearest=list(nearest),
        )


class EngineError(LocalragError):
    """llama.cpp failed, or ran out of memory."""

    exit_code = 7


class InterruptedRunError(LocalragError):
    """The user stopped the run."""

    exit_code = 130


def counted(num: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: "1 turn", "1,234 bytes". `plural` defaults to the noun with an s."""
    return f"{num:,} {noun if num == 1 else plural or noun + 's'}"
