"""Every error that localrag raises on purpose.

    LocalragError
    ├── UsageError                  2   the command was called wrongly
    ├── ConfigError                 3   models.toml or the environment
    │   └── BundleError                 an air-gap bundle cannot be made or used
    ├── ModelError                  4   a model cannot be used
    │   ├── ModelNotFoundError          not in the catalogue, or not on this machine
    │   ├── ModelFileError              the file is damaged, foreign or changed
    │   └── TemplateError               the chat template is missing, hostile or unusable
    ├── BudgetExceededError         5   the parts that cannot be cut do not fit
    ├── TimeLimitError              5   nor does the shortest answer fit a limit of time
    ├── KnowledgeBaseError          6   a knowledge base cannot be used
    │   ├── KnowledgeBaseNotFoundError
    │   └── KnowledgeBaseBusyError      another process is indexing
    ├── EngineError                 7   llama.cpp refused, or ran out
    └── InterruptedRunError       130   the person stopped it

The number is the exit code of the command line. An error carries one line that says what is wrong, a hint that is a
way out, and the numbers that it is about, so that a script reads them without parsing prose.
"""

from __future__ import annotations

from typing import ClassVar


class LocalragError(Exception):
    """What went wrong (`message`), the way out (`hint`), and `numbers` by name, all fit for JSON."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **numbers: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.numbers = numbers

    def to_dict(self) -> dict[str, object]:
        """The object under `"error"` in `--json` output."""
        return {"type": type(self).__name__, "message": self.message, "hint": self.hint, **self.numbers}


class UsageError(LocalragError):
    """A command or a function was called wrongly."""

    exit_code = 2


class ConfigError(LocalragError):
    """A models.toml file or the environment is wrong."""

    exit_code = 3


class BundleError(ConfigError):
    """An air-gap bundle cannot be made or used."""


class ModelError(LocalragError):
    """A model cannot be used."""

    exit_code = 4


class ModelNotFoundError(ModelError):
    """A model is not in models.toml, or not on this machine."""


class ModelFileError(ModelError):
    """A model's file is damaged, foreign or changed."""


class TemplateError(ModelError):
    """A chat template is missing, hostile or unusable."""


class BudgetExceededError(LocalragError):
    """The minimums of the sections add up to more than the window; `sections` maps each name to its minimum in tokens.

    `role` is whose prompt it is, where several have one.
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
        """The same, of a role's prompt; with another way out where a `hint` is given."""
        return BudgetExceededError(self.numbers["window"], self.numbers["sections"], hint=hint or self.hint, role=role)  # type: ignore[arg-type]  # as given


class TimeLimitError(LocalragError):
    """Even the shortest answer takes longer than the limit; both are in seconds."""

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
    """There is no knowledge base of that name."""


class KnowledgeBaseBusyError(KnowledgeBaseError):
    """Another process is indexing into the knowledge base."""


class EngineError(LocalragError):
    """llama.cpp refused, or ran out of what it needs."""

    exit_code = 7


class InterruptedRunError(LocalragError):
    """A person stopped the run."""

    exit_code = 130


def counted(num: int, noun: str, plural: str = "") -> str:
    """A number with its noun, as messages say it: "1 turn", "1,234 bytes". `plural` is given where it is not the noun with an s."""
    return f"{num:,} {noun if num == 1 else plural or noun + 's'}"
