"""Conversations: what is asked, what is kept whole, and a summary of what is not."""

from localrag.conversation.exchanges import Exchange, Numbered, Split, fit, newest, search_query, split
from localrag.conversation.rolling import Covered, Rolling

__all__ = ["Covered", "Exchange", "Numbered", "Rolling", "Split", "fit", "newest", "search_query", "split"]
