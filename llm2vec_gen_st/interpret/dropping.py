"""Which tokens a lens leaves out, so that what the model added stands out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Tokenizers split "it's" and "don't" into "it", "s", "don" and "t", so these are here too.
_ENGLISH = """
a about above after again against all almost also although always am among an and another any are as at
be became because become been before being below between both but by
can cannot could d did do does doing done down during
each either else etc even ever every few for from further
get gets got had has have having he her here hers herself him himself his how however
i if in instead into is it its itself just
let like ll m many may me might mine more most much must my myself
neither never no nor not now of off often on once one only onto or other others our ours ourselves out over own
per quite rather re really s same shall she should since so some such
t than that the their theirs them themselves then there these they this those though through thus to too toward
under until up upon us use used using ve very via
was we well were what when where whether which while who whom whose why will with within without would
yes yet you your yours yourself yourselves
ain aren couldn didn doesn don hadn hasn haven isn mightn mustn needn shan shouldn wasn weren wouldn
"""
ENGLISH_STOP_WORDS = frozenset(_ENGLISH.split())


@dataclass(frozen=True)
class Dropping:
    """Which tokens are left out.

    Args:
        stop_words: Words that say little, in lower case.
        punctuation: Whether tokens without a letter or digit are left out: punctuation, whitespace, control tokens, and
            pieces of a character.
        query_words: Whether words of the text itself are left out, whole ones and the tokens they are made of.

    Example:
        >>> Dropping().drops(" The"), Dropping().drops(" honey"), Dropping().drops(" Bees", {"bees"})
        (True, False, True)
    """

    stop_words: Collection[str] = ENGLISH_STOP_WORDS
    punctuation: bool = True
    query_words: bool = True

    def drops(self, token: str, words: Collection[str] = ()) -> bool:
        """Whether a token is left out.

        Args:
            token: Its text.
            words: Words of the text that is looked at, from :func:`words_of`.
        """
        word = bare_word(token)
        if not word:
            return self.punctuation
        return word in self.stop_words or (self.query_words and word in words)


def bare_word(token: str) -> str:
    r"""A token without case, and without anything but letters and digits at its ends; empty if it has none.

    Example:
        >>> bare_word(" (Honey"), bare_word("\n--")
        ('honey', '')
    """
    folded = token.casefold()
    places = [place for place, character in enumerate(folded) if character.isalnum()]
    return folded[places[0] : places[-1] + 1] if places else ""


def words_of(text: str, tokens: Iterable[str] = ()) -> frozenset[str]:
    """The words of a text, as :meth:`Dropping.drops` compares them.

    Args:
        text: The text.
        tokens: The tokens it is made of; a word that is split makes its pieces words too.

    Example:
        >>> sorted(words_of("Reset my password", [" pass", "word"]))
        ['my', 'pass', 'password', 'reset', 'word']
    """
    found = {bare_word(word) for word in [*re.findall(r"\w+", text), *text.split(), *tokens]}
    return frozenset(found - {""})
