"""A small written language whose texts can be judged: how glad they sound, how much they describe.

Sentences have five to about sixteen words, so that a fixed-length continuation of 24 tokens has a full stop at index 16
or later about two times in three: the rejection of the historical recipe has something to do.

Not covered: meaning. A judge counts words; that is what makes the true score known, and reward hacking visible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, UNKNOWN, STOP = "<|endoftext|>", "<|unknown|>", "."


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words("he she they anna omar the_child the_old_man her_sister")
NOUNS = _words("door river garden house letter road table window horse boat lamp coat stone field song fire")
VERBS = _words("opened found watched left crossed carried followed remembered painted touched heard lost")
PLACES = _words("near behind beyond under beside above")
ADJECTIVES = _words("tall dark silver quiet narrow wooden golden ancient pale heavy crooked velvet")
GLAD = _words("happy delighted hopeful proud calm grateful joyful loved")
SAD = _words("sad afraid angry lonely bitter tired ashamed broken")
GLUE = ["the", "a", "was", "and", ",", STOP]

VOCABULARY = [END_OF_TEXT, UNKNOWN, *GLUE, *NAMES, *NOUNS, *VERBS, *PLACES, *ADJECTIVES, *GLAD, *SAD]

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- message.content }}"
    "{%- if message.role == 'assistant' %}{{- '" + END_OF_TEXT + "' }}{%- endif %}{%- endfor %}"
)
"""Text as it is: a prompt is continued, not answered."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; words are separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, unk_token=UNKNOWN
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_text(rng: random.Random, num_words: int) -> list[str]:
    """At least `num_words` words of whole sentences, beginning in the middle of one, as a cut from a book does."""
    words = sentence(rng)
    words = words[rng.randrange(len(words)) :]
    while len(words) < num_words:
        words += sentence(rng)
    return words


def sentence(rng: random.Random) -> list[str]:
    words = clause(rng)
    while rng.random() < 0.3:
        words += [",", "and", *clause(rng)]
    return [*words, STOP]


def clause(rng: random.Random) -> list[str]:
    """Someone felt something, or did something to a thing."""
    who = rng.choice(NAMES)
    if rng.random() < 0.35:
        return [who, "was", rng.choice(GLAD if rng.random() < 0.5 else SAD), *_place(rng)]
    return [who, rng.choice(VERBS), *_thing(rng), *_place(rng)]


def _thing(rng: random.Random) -> list[str]:
    adjectives = [rng.choice(ADJECTIVES)] if rng.random() < 0.3 else []
    return [rng.choice(["the", "a"]), *adjectives, rng.choice(NOUNS)]


def _place(rng: random.Random) -> list[str]:
    return [rng.choice(PLACES), *_thing(rng)] if rng.random() < 0.4 else []


def sentiment(words: Sequence[str]) -> float:
    """Glad words less sad ones."""
    return float(sum(word in GLAD for word in words) - sum(word in SAD for word in words))


def descriptiveness(words: Sequence[str]) -> float:
    """Adjectives."""
    return float(sum(word in ADJECTIVES for word in words))


JUDGES: Mapping[str, Callable[[Sequence[str]], float]] = {"sentiment": sentiment, "descriptiveness": descriptiveness}
"""What raters of a task look at, without their noise."""
