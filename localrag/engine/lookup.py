"""Guess the next tokens of an answer: those that followed an earlier occurrence of its last tokens, in the prompt or in the answer.

Answers from documents copy names, numbers and whole sentences. A model can check several guessed tokens (a draft) in one batch, which may
take less time than a batch for each. `Speed.draft_size` decides how many to guess.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM = 3
"""Number of last tokens to look up. Looking up 2 gives more drafts, of which fewer are right. That was no faster (measured)."""
DRAFT_SIZES = (3, 8)
"""Numbers of tokens to guess at a time. A choice between all numbers from 1 to 8 was hardly faster (measured)."""


class Lookup:
    """The tokens of a prompt and its answer so far, and the place where each n-gram among them last occurred.

    The next token is guessed to be the one after the last occurrence of the last n-gram. While the guesses are right, they go on from
    there. Adding a token takes constant time.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._guess_at: int | None = None
        self.num_right = 0
        """Number of right guesses in a row."""
        self.add(token_ids)
        self.num_right = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def has_guess(self) -> bool:
        """Whether the last tokens occurred before."""
        return self._guess_at is not None

    def add(self, token_ids: Iterable[int]) -> list[tuple[int, bool]]:
        """Add the next tokens. Return, for each for which there was a guess, how many in a row were right before, and whether it was."""
        outcomes = []
        for token in token_ids:
            guess_at, num_right = self._guess_at, self.num_right
            is_right = guess_at is not None and self._ids[guess_at] == token
            if guess_at is not None:
                outcomes.append((num_right, is_right))
            self._ids.append(token)
            ngram = tuple(self._ids[-NGRAM:])
            last_end = self._ends.get(ngram)
            self._ends[ngram] = len(self._ids)
            if guess_at is not None and is_right:
                self._guess_at, self.num_right = guess_at + 1, num_right + 1
            else:
                self._guess_at, self.num_right = last_end, 0
        return outcomes

    def draft(self, num_tokens: int) -> list[int]:
        """Guess the next tokens; none if the last n-gram is new. Past the last token, the guess repeats itself, as such a text does."""
        if self._guess_at is None:
            return []
        period = len(self._ids) - self._guess_at
        return [self._ids[self._guess_at + at % period] for at in range(num_tokens)]
